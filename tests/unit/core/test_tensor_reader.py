"""Rows of stored tensors, read piece by piece."""

import pytest
import torch

from megatron_fbt.core import tensor_reader
from megatron_fbt.core.manifest import MANIFEST, hash_file, write_manifest
from megatron_fbt.core.tensor_reader import TensorReader
from megatron_fbt.errors import CheckpointError
from tests.unit.hf.checkpoints import write_checkpoint
from tests.unit.hf.reference import tiny_config

TENSORS = {
    "matrix": torch.randn(100, 7).bfloat16(),
    "vector": torch.randn(33),
    "turned": torch.randn(5, 6).t(),  # its storage is not row after row
    "part": torch.randn(40, 6)[10:20],
    "half": torch.randn(9, 4).half(),
}


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path / "step", TENSORS, tiny_config())
    return tmp_path / "step"


def test_every_row_range_of_every_tensor(folder):
    reader = TensorReader(folder)
    assert reader.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}, "no optimizer state"
    for name, tensor in TENSORS.items():
        assert reader.dtypes[name] == tensor.dtype
        for start, stop in ((0, len(tensor)), (2, 5), (len(tensor) - 1, len(tensor))):
            assert torch.equal(reader.rows(name, start, stop), tensor[start:stop])


def test_rows_behind_the_first_are_padding(folder):
    reader = TensorReader(folder, first_rows={"matrix": 60, "vector": 40, "absent": 3})
    assert (reader.shapes["matrix"], reader.shapes["vector"]) == ((60, 7), (33,))
    assert "absent" not in reader.shapes


def test_no_tensor_is_loaded_whole(folder, monkeypatch):
    reader = TensorReader(folder)
    monkeypatch.setattr(tensor_reader.torch, "load", lambda *arguments, **options: pytest.fail("torch.load"))
    assert all(len(reader.rows(name, 0, 2)) == 2 for name in set(TENSORS) - {"turned"})


@pytest.mark.parametrize("damage", ["flipped bit", "cut"])
def test_a_damaged_file_is_named(folder, damage):
    path = next(folder.glob("*.distcp"))
    content = bytearray(path.read_bytes())
    place = content.find(TENSORS["vector"].numpy().tobytes())
    assert place > 0
    content[place + 9] ^= 4
    path.write_bytes(content if damage == "flipped bit" else content[:place])
    if damage == "flipped bit":  # the manifest's hash is not what is compared here
        (folder / MANIFEST).unlink()
        names = [entry for entry in folder.iterdir() if entry.name != "config.yaml"]
        write_manifest(folder, {entry.name: hash_file(entry) for entry in names}, {})
    with pytest.raises(CheckpointError, match=path.name):
        TensorReader(folder).rows("vector", 0, 2)
    if damage == "flipped bit":
        assert torch.equal(TensorReader(folder).rows("matrix", 0, 3), TENSORS["matrix"][:3])
