"""An index executes nothing."""

import io
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fbt.core.safe_index import IndexUnpickler, read_index
from megatron_fbt.errors import DamagedCheckpointError


class Runs:
    """A pickle of this calls a function when it is read."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def index(place="__0_0.distcp", extra=None):
    size = torch.Size([2, 3])
    tensors = {
        dtype: TensorStorageMetadata(
            TensorProperties(getattr(torch, dtype)), size, [ChunkStorageMetadata(torch.Size([0, 0]), size)]
        )
        for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int64")
    }
    places = {MetadataIndex("float32", torch.Size([0, 0]), 0): _StorageInfo(place, 0, 24)}
    return Metadata({**tensors, "bytes": BytesStorageMetadata()}, extra, places, StorageMeta("folder", "save"))


def write(folder, content, protocol=pickle.DEFAULT_PROTOCOL):
    (folder / ".metadata").write_bytes(pickle.dumps(content, protocol=protocol))
    return folder


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_an_index_is_read(tmp_path, protocol):
    written = index(extra={"a": [1, (2.0, None)], "b": {"c": b"d"} if protocol > 2 else "c"})
    assert read_index(write(tmp_path, written, protocol)) == written


@pytest.mark.parametrize("where", ["alone", "inside"])
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_an_index_that_would_run_code_is_refused_and_runs_nothing(tmp_path, where, protocol):
    proof = tmp_path / "proof"
    for trap in (
        Runs(os.mkdir, str(proof)),
        Runs(eval, f"__import__('os').mkdir({str(proof)!r})"),
        Runs(getattr, 1, "x"),
    ):
        write(tmp_path, trap if where == "alone" else index(extra=[trap]), protocol)
        with pytest.raises(
            DamagedCheckpointError, match=r"\.metadata cannot be read: .* does not belong into an index"
        ):
            read_index(tmp_path)
        assert not proof.exists()


@pytest.mark.parametrize("name", ["load", "serialization.load", "hub.load", "ops", "classes", "Tensor"])
def test_no_function_of_torch_is_reached_through_its_types(name):
    with pytest.raises(pickle.UnpicklingError, match="does not belong"):
        IndexUnpickler(
            io.BytesIO(b"\x80\x04" + b"\x8c\x05torch\x8c" + bytes([len(name)]) + name.encode() + b"\x93.")
        ).load()


@pytest.mark.parametrize("place", ["../__0_0.distcp", "/etc/passwd", "a/b"])
def test_a_place_outside_of_the_checkpoint_is_refused(tmp_path, place):
    with pytest.raises(DamagedCheckpointError, match="names a file elsewhere"):
        read_index(write(tmp_path, index(place)))


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(index())[:-20]])
def test_a_damaged_index_is_named(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata cannot be read"):
        read_index(tmp_path)
