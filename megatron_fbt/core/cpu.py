"""Megatron-Core on CPU.

Megatron-Core names the device "cuda" in about two dozen places. `enable_cpu_mode` gives those names a CPU meaning:
allocations land on the CPU, device queries answer "cpu", random-state calls use PyTorch's default generator. It is
the only place where anything is redirected, and it does nothing where a GPU is present.
"""

import contextlib
import functools
from typing import Iterator

import torch
import torch.distributed

FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")


class _NoStream:
    """A stand-in for CUDA streams: CPU work is always in order."""

    def wait_event(self, *args) -> None:
        """There is nothing to wait for."""

    def wait_stream(self, *args) -> None:
        """There is nothing to wait for."""


def on_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def current_device() -> torch.device:
    """Device on which this process computes."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def _on_cpu(factory):
    @functools.wraps(factory)
    def wrapper(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    wrapper.cpu_mode = True
    return wrapper


def _keep_sent_storage() -> None:
    """Let an asynchronous send keep the memory of its tensor.

    Megatron-Core's schedules free a sent output by swapping its storage. On a GPU the stream's order makes that safe;
    gloo would go on reading freed memory, silently. A detached alias has a storage reference of its own.
    """
    plain = torch.distributed.isend

    @functools.wraps(plain)
    def isend(tensor, *args, **kwargs):
        return plain(tensor.detach(), *args, **kwargs)

    torch.distributed.isend = isend


def enable_cpu_mode() -> bool:
    """Redirect Megatron-Core's CUDA calls to the CPU. Idempotent.

    Returns:
        Whether CPU mode is on (False where a GPU is present: nothing was changed).
    """
    if on_gpu():
        return False
    if getattr(torch.zeros, "cpu_mode", False):
        return True
    import megatron.core.tensor_parallel.random as mcore_random

    with torch.device("cpu"):  # makes PyTorch list its factories now: a default device works on the plain ones alone
        torch.empty(0)
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _keep_sent_storage()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *args, **kwargs: _NoStream()
    torch.cuda.default_stream = lambda *args, **kwargs: _NoStream()
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    mcore_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    return True


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Megatron-Core's optimizers compare the names of tensor types: within this context CPU tensors say "cuda"."""
    if on_gpu():
        yield
        return
    plain = torch.Tensor.type

    def named(self, *args, **kwargs):
        result = plain(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = plain
