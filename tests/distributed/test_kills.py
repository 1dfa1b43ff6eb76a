"""SIGKILL at instants spread over runs that save often: nothing is lost, changed or repeated.

An instant is the moment before one of a run's changes to its files (each write, fsync, rename, removal), before a step,
a read of a batch or a part of a validation. The killed run is resumed, and must end as one that was never killed.
"""

import functools
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest
import torch

from tests.distributed.launch import DistributedFailure
from tests.distributed.launch import run_distributed as run_ranks
from tests.distributed.run_case import STEPS, checkpoint_of, rows_of, run, run_config, write_corpus

run_distributed = functools.partial(run_ranks, timeout=300, init_group=False)
OPTIONS = {
    "checkpoint__save_interval": 2,
    "checkpoint__keep_last": 2,
    "training__eval_interval": 5,
    "training__eval_iters": 1,
    "model__hidden_dropout": 0.1,
}
# Name -> processes, settings.
VARIANTS: Dict[str, Tuple[int, Dict[str, Any]]] = {
    "one process": (1, {}),
    "two processes, sharded": (2, {"optimizer__sharding": "megatron"}),
    "one process, asynchronous": (1, {"checkpoint__async_save": True}),
}
Instant = Tuple[int, str, int]
"""Rank, kind of the call that would follow, how many of that kind were before."""
WRITES = 500
"""One of so many writes counts: there are a hundred times as many as of all other kinds together."""


class Instants:
    """Counts the instants of this rank's run, and ends the process with SIGKILL at one of them.

    Args:
        folder: the run folder; changes elsewhere do not count.
        deadly: kind of the call, and how many of that kind go well; None = no kill.
    """

    def __init__(self, folder: str, deadly: Optional[Tuple[str, int]]):
        self.folder, self.deadly = folder, deadly
        self.counts: Dict[str, int] = {}
        self.patched: List[Tuple[Any, str, Any]] = []
        self.lock = threading.Lock()

    def __enter__(self) -> "Instants":
        from megatron_fbt.core.manifest import HashingFile
        from megatron_fbt.training import trainer, validation

        for name in ("rename", "replace", "mkdir", "unlink", "rmdir", "fsync"):
            self._patch(os, name, on_path=True)
        self._patch(HashingFile, "write")
        self._patch(trainer.Trainer, "_step")
        self._patch(trainer, "load_micro_batches")
        self._patch(validation.Validator, "_measure")
        return self

    def __exit__(self, *exception: object) -> None:
        for place, name, plain in self.patched:
            setattr(place, name, plain)

    def _patch(self, place: Any, name: str, on_path: bool = False) -> None:
        plain = getattr(place, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread().name != "lease" and (not on_path or self._concerns(arguments, options)):
                self._pass_by(name)
            return plain(*arguments, **options)

        self.patched.append((place, name, plain))
        setattr(place, name, call)

    def _concerns(self, arguments: Tuple[Any, ...], options: Dict[str, Any]) -> bool:
        if options.get("dir_fd") is not None:  # shutil.rmtree
            return True
        paths = [self._path(argument) for argument in arguments[:2]]
        return any(path.startswith(self.folder) for path in paths)

    @staticmethod
    def _path(argument: Any) -> str:
        """A path, or that of an open file; what is neither gives something that is no path."""
        named = f"/proc/self/fd/{argument}"
        return os.readlink(named) if isinstance(argument, int) and os.path.exists(named) else str(argument)

    def _pass_by(self, name: str) -> None:
        with self.lock:
            count = self.counts.get(name, 0)
            if self.deadly == (name, count // WRITES if name == "write" else count):
                os.kill(os.getpid(), signal.SIGKILL)
            self.counts[name] = count + 1


def run_with_instants(
    rank: int, world_size: int, folder: str, corpus: str, settings: dict, deadly: Optional[Instant]
) -> Dict[str, int]:
    """Run to the end, or to the deadly instant; how many instants of each kind there were."""
    config = run_config(Path(folder), corpus, **OPTIONS, **settings)
    here = deadly is not None and rank == deadly[0]
    with Instants(folder, deadly[1:] if here else None) as instants:
        assert run(config) == "finished"
    return {name: count // WRITES if name == "write" else count for name, count in instants.counts.items()}


def spread(counts: List[Dict[str, int]], wanted: int, first: int) -> List[Instant]:
    """Instants of all ranks and kinds in turn, from a first kind on; those of one kind in equal distances."""
    kinds = [(rank, kind) for rank, found in enumerate(counts) for kind, count in sorted(found.items()) if count]
    kinds = kinds[first % len(kinds) :] + kinds[: first % len(kinds)]
    shares = {place: len(range(number, wanted, len(kinds))) for number, place in enumerate(kinds)}
    return [
        (rank, kind, (2 * number + 1) * counts[rank][kind] // (2 * share))
        for (rank, kind), share in shares.items()
        for number in range(share)
    ]


def kill_and_resume(tmp_path: Path, corpus: str, wanted: int, say: Callable[[str], None]) -> List[str]:
    """Kill each variant at its share of the instants; what was lost."""
    lost, tried, began = [], 0, time.monotonic()
    say(f"\n{'variant':28} rank, killed before: what came of it")
    for number, (variant, (world_size, settings)) in enumerate(VARIANTS.items()):
        whole = tmp_path / f"whole{number}"
        counts = run_distributed(run_with_instants, world_size, str(whole), corpus, settings, None)
        share = wanted // len(VARIANTS) + (number < wanted % len(VARIANTS))
        for deadly in spread(counts, share, first=tried):
            folder = tmp_path / f"killed{number}"
            problem = one_kill(folder, whole, corpus, world_size, settings, deadly)
            say(f"{variant:28} rank {deadly[0]}, {deadly[1]} {deadly[2]}: {problem or 'survived'}")
            lost, tried = lost + ([problem] if problem else []), tried + 1
            shutil.rmtree(folder)
    minutes = (time.monotonic() - began) / 60
    say(f"faults tried {tried}, survived {tried - len(lost)}, lost {len(lost)}; {minutes:.1f} minutes")
    return lost


def one_kill(folder: Path, whole: Path, corpus: str, world_size: int, settings: dict, deadly: Instant) -> Optional[str]:
    """Kill a run and resume it; what is wrong with the end, or None."""
    with pytest.raises(DistributedFailure, match="died without a word, exit code -9"):
        run_distributed(run_with_instants, world_size, str(folder), corpus, settings, deadly)
    try:
        run_distributed(run_with_instants, world_size, str(folder), corpus, settings, None)
    except DistributedFailure as error:
        return f"no resume: {error}"
    if rows_of(folder) != rows_of(whole):
        return "other rows"
    found, expected = checkpoint_of(folder, STEPS), checkpoint_of(whole, STEPS)
    if found.keys() != expected.keys():
        return "other tensors"
    differing = [name for name in found if not torch.equal(found[name], expected[name])]
    for place in (".", "checkpoints"):
        kept, wanted = ({path.name for path in (run / place).iterdir()} for run in (folder, whole))
        if kept != wanted:
            return f"left behind or missing in {place}: {sorted(kept ^ wanted)}"
    return f"other values: {differing[:3]}" if differing else None


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """In main memory where that is possible: a killed process is no loss of power, so fsync may cost nothing."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [8, pytest.param(48, marks=pytest.mark.soak)])
def test_a_run_killed_at_any_instant_and_resumed_equals_an_unbroken_one(memory_folder, wanted, capsys):
    corpus = write_corpus(memory_folder)

    def say(text: str) -> None:
        with capsys.disabled():
            print(text)

    assert kill_and_resume(memory_folder, corpus, wanted, say) == []
