"""Bytes of the tensors that are alive, counted at every operator: exact, and the same in every run.

Memory that a kernel takes for itself and gives back before it returns is not seen.
"""

import sys
import weakref
from collections import Counter
from typing import Any, Dict, List, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Counts the storages that operators make while it is active, until they are freed.

    What was there before counts as nothing, so a step's own memory stands above that of weights, gradients and
    optimizer. Backward passes count, too, as those on a CPU run in the thread that asks for them.

    Args:
        origins: remember what made each storage, for `largest`; slow.
    """

    def __init__(self, origins: bool = False):
        super().__init__()
        self.now = self.peak = 0
        self.marks: List[Tuple[str, int]] = []
        """(name, bytes alive) in the order of `mark`."""
        self.samples: List[int] = []
        """Bytes alive after each operator."""
        self._origins = origins
        self._alive: Dict[int, Tuple[Any, int, str]] = {}
        self._known: "weakref.WeakSet[Any]" = weakref.WeakSet()
        self._at_peak: Counter = Counter()

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Let these storages count as having been there before."""
        self._known.update(tensor.untyped_storage() for tensor in tensors)

    def mark(self, name: str) -> None:
        """Note the bytes alive at a point of the step."""
        self.marks.append((name, self.now))

    def timeline(self, parts: int) -> List[int]:
        """Most bytes alive in each of so many equal parts of the operators."""
        edges = [len(self.samples) * part // parts for part in range(parts + 1)]
        return [max(self.samples[a : max(b, a + 1)], default=0) for a, b in zip(edges, edges[1:])]

    def largest(self) -> List[Tuple[str, int]]:
        """(origin, bytes) of what was alive at the peak, largest first."""
        return self._at_peak.most_common()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        """Run an operator and count what it has made."""
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = operator(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and id(result.untyped_storage()) not in given:
                self._count(result.untyped_storage(), str(operator))
        self.samples.append(self.now)
        return results

    def _count(self, storage: torch.UntypedStorage, operator: str) -> None:
        key = id(storage)
        if key in self._alive or storage in self._known:
            return
        size = storage.nbytes()
        origin = f"{operator} in {_caller()}" if self._origins else ""
        self._alive[key] = (weakref.ref(storage, lambda _: self._free(key)), size, origin)
        self.now += size
        if self.now > self.peak:
            self.peak = self.now
            if self._origins:
                self._at_peak = Counter()
                for _, held, made_by in self._alive.values():
                    self._at_peak[made_by] += held

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)[1]


def _caller() -> str:
    """The innermost three functions of this package that are running."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 3:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("megatron"):
            found.append(f"{name.rpartition('.')[2]}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "backward"
