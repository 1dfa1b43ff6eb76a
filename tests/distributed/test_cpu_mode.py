"""Megatron-Core on CPU: what is redirected, and memory of sent tensors."""

import weakref

import numpy
import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import run_distributed

ROUNDS = 12
COUNT = 300_000
"""Elements of a sent tensor: more than any socket buffer takes."""


class Watched(numpy.ndarray):
    """Memory whose end can be noticed."""


def release(out) -> None:
    """Free an output as Megatron-Core's schedules do after a send."""
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    deallocate_output_tensor(out, True)
    assert out.numel() == 1


def send_and_free(rank, world_size, wrapped):
    """Rank 0 sends tensors that it frees at once; freed memory is overwritten before the receiver asks for it.

    Returns:
        Rank 0: in how many rounds the memory was freed while its send was under way. Rank 1: what arrived right.
    """
    from megatron_fbt.core.cpu import enable_cpu_mode

    if wrapped:
        assert enable_cpu_mode()
    store = dist.distributed_c10d._get_default_store()
    return _send(store) if rank == 0 else _receive(store)


def _send(store) -> int:
    early, sent, kept = [], [], []
    for number in range(ROUNDS):
        memory = numpy.full(COUNT, number, dtype=numpy.float32)
        kept.append(memory)  # so that writing into it after its release is no crash
        handle = memory.view(Watched)
        out = torch.from_numpy(handle)
        ended = weakref.finalize(handle, memory.fill, -1)
        del handle
        assert ended.alive
        sent.append(torch.distributed.isend(tensor=out, dst=1))
        release(out)
        early.append(not ended.alive)
        [torch.full((COUNT,), -2.0) for _ in range(3)]
    store.set("freed", "1")
    for work in sent:
        work.wait()
    return sum(early)


def _receive(store) -> int:
    store.wait(["freed"])  # nothing leaves the sender before the receive is posted
    right, buffer = 0, torch.empty(COUNT)
    for number in range(ROUNDS):
        dist.recv(buffer, src=0)
        right += int(bool((buffer == number).all()))
    return right


def test_a_sent_tensor_outlives_its_release():
    assert run_distributed(send_and_free, 2, True) == [0, ROUNDS]


def test_without_cpu_mode_freed_memory_would_be_sent():
    assert run_distributed(send_and_free, 2, False) == [ROUNDS, 0]


def names_of(module, names):
    return {name: getattr(module, name) for name in names}


def redirected(rank, world_size):
    """Everything that CPU mode touches, before, after one and after two calls."""
    import megatron.core.tensor_parallel.random as mcore_random

    from megatron_fbt.core.cpu import FACTORIES, current_device, enable_cpu_mode

    places = [
        (torch, FACTORIES),
        (torch.Tensor, ("cuda", "type")),
        (torch.cuda, ("current_device", "current_stream", "default_stream", "synchronize", "manual_seed")),
        (torch.cuda, ("get_rng_state",)),
        (torch.distributed, ("isend", "irecv")),
        (mcore_random, ("_get_cuda_rng_state", "_set_cuda_rng_state")),
    ]
    before = [names_of(*place) for place in places]
    answers = [enable_cpu_mode()]
    once = [names_of(*place) for place in places]
    answers.append(enable_cpu_mode())
    twice = [names_of(*place) for place in places]
    changed = sorted(name for a, b in zip(before, once) for name in a if a[name] is not b[name])
    device = torch.cuda.current_device()
    tensors = [
        torch.empty(2, device="cuda"),
        torch.zeros(2, device=device),
        torch.tensor([1], device=torch.device("cuda", 0)),
        torch.arange(3, device="cuda:0"),
        torch.ones(1).cuda(),
        torch.full((1,), 2.0),
    ]
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    mcore_random._set_cuda_rng_state(state)
    return {
        "answers": answers,
        "idempotent": all(a[name] is b[name] for a, b in zip(once, twice) for name in a),
        "changed": changed,
        "devices": {str(tensor.device) for tensor in tensors} | {str(current_device()), str(device)},
        "state restored": torch.equal(torch.rand(3), first),
    }


def type_names(rank, world_size):
    """Names of tensor types outside, inside, after an error and after the context."""
    from megatron_fbt.core.cpu import cuda_type_names

    plain = torch.Tensor.type
    single, half = torch.ones(1), torch.ones(1).bfloat16()

    def names():
        return [single.type(), half.type(), str(single.type(torch.bfloat16).dtype)]

    seen = [names()]
    with cuda_type_names():
        seen.append(names())
    seen.append(names())
    with pytest.raises(KeyError), cuda_type_names():
        raise KeyError
    seen.append(names())
    return seen, torch.Tensor.type is plain


def test_cpu_mode_is_switched_on_once():
    (found,) = run_distributed(redirected, 1)
    assert found["answers"] == [True, True] and found["idempotent"]
    assert "isend" in found["changed"] and "empty" in found["changed"] and "current_device" in found["changed"]
    assert "irecv" not in found["changed"] and "type" not in found["changed"]
    assert found["devices"] == {"cpu"}
    assert found["state restored"]


def test_type_names_are_restored():
    ((outside, inside, after, after_error), restored) = run_distributed(type_names, 1)[0]
    assert outside == ["torch.FloatTensor", "torch.BFloat16Tensor", "torch.bfloat16"]
    assert inside == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", "torch.bfloat16"]
    assert after == after_error == outside and restored
