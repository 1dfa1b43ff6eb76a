"""Tensors that are written one after another, by their order and never two at a time."""

import threading
import time

import torch

from megatron_fbt.core.checkpoint_io import read_tensors
from megatron_fbt.core.checkpoint_stream import TensorSource, stream_tensors
from megatron_fbt.core.manifest import write_manifest


def test_one_tensor_is_held_at_a_time(tmp_path):
    tensors = {f"layer.{n}": torch.full((4, n + 1), float(n)) for n in range(6)}
    reading, order = threading.Lock(), []

    def source(name):
        def read():
            assert reading.acquire(blocking=False), "two tensors are read at the same time"
            time.sleep(0.02)
            order.append(name)
            reading.release()
            return tensors[name]

        return TensorSource(tuple(tensors[name].shape), torch.float32, read)

    files = stream_tensors({name: source(name) for name in tensors}, tmp_path)
    assert order == list(tensors)
    write_manifest(tmp_path, files, {})
    found = read_tensors(tmp_path)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
