"""Boxes of tensors: cut from flat ranges, written once, read back into whatever boxes a layout has."""

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fbt.core.checkpoint_io import read_pieces
from megatron_fbt.core.manifest import HASH, hash_file, write_manifest
from megatron_fbt.core.pieces import Piece, boxes, pieces_to_write, range_pieces, weight_pieces
from megatron_fbt.errors import DamagedCheckpointError


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 5), (1, 6), (6, 1), (3, 2, 4)])
def test_the_boxes_of_every_range_are_its_elements_in_order(shape):
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for begin in range(numbers.numel() + 1):
        for end in range(begin, numbers.numel() + 1):
            found = []
            for offsets, sizes in boxes(begin, end, shape):
                box = numbers[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
                assert box.is_contiguous() and tuple(box.shape) == sizes and 0 not in sizes
                found += box.flatten().tolist()
            assert found == list(range(begin, end))
            assert len(list(boxes(begin, end, shape))) <= max(1, 2 * len(shape) - 1)


def stacked(tensor, replica=(0, 0, 0)):
    """Two matrices on top of each other in one weight, as Megatron-Core describes gate and up projection."""

    def build(key, data, replica_id, flattened_range):
        halves = torch.chunk(data, 2)
        return [
            ShardedTensor.from_rank_offsets(key, half, (0, number, 2), replica_id=replica_id)
            for number, half in enumerate(halves)
        ]

    return ShardedTensorFactory("fc1", tensor, build, torch.cat, replica)


def described(rank=0, replica=(0, 0, 0)):
    """A matrix of which this tensor-parallel rank has two of four columns, and a stacked one."""
    whole = torch.arange(24.0).view(6, 4)
    plain = ShardedTensor.from_rank_offsets(
        "fc2", whole[:, 2 * rank : 2 * rank + 2].contiguous(), (1, rank, 2), replica_id=replica
    )
    return {"a": plain, "b": stacked(torch.arange(32.0).view(8, 4), replica)}


def test_ranges_of_a_weight_lie_where_its_elements_do():
    for name, entry in described(rank=1).items():
        whole = {piece.name: torch.full(piece.size, -1.0) for piece in weight_pieces({name: entry})[name]}
        flat = entry.data.flatten()
        for begin, end in ((0, 3), (3, 10), (10, 12), (12, flat.numel())):
            for piece in range_pieces(entry, "optimizer.exp_avg.", begin, flat[begin:end], sharded=True):
                assert piece.name.startswith("optimizer.exp_avg.") and not piece.replicated
                place = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.tensor.shape, strict=True))
                whole[piece.name.removeprefix("optimizer.exp_avg.")][place] = piece.tensor
        for piece in weight_pieces({name: entry})[name]:
            place = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.tensor.shape, strict=True))
            assert torch.equal(whole[piece.name][place], piece.tensor)


def test_each_box_is_written_by_one_rank_and_copies_are_shared_out():
    written = []
    for data_rank in range(3):
        pieces = [p for found in weight_pieces(described(replica=(0, 0, data_rank))).values() for p in found]
        written.append({p.key for p in pieces_to_write(pieces, data_rank, 3)})
    assert sorted(map(len, written)) == [1, 1, 1] and len(set.union(*written)) == 3
    copies = [p for found in weight_pieces(described(replica=(0, 1, 0))).values() for p in found]
    assert pieces_to_write(copies, 0, 3) == [], "the copies of another tensor-parallel rank"
    own = range_pieces(described()["a"], "x.", 2, torch.zeros(3), sharded=True)
    assert pieces_to_write(own, 2, 3) == own, "a part that no other rank has"


WHOLE = torch.randn(12, 6)
CUTS = [((0, 0), (5, 6)), ((5, 0), (7, 2)), ((5, 2), (7, 4))]


@pytest.fixture
def stored(tmp_path):
    """A tensor in three chunks in two files, with its index."""
    files, chunks, places = {}, [], {}
    for number, (offsets, sizes) in enumerate(CUTS):
        path = tmp_path / f"__{number % 2}_0.distcp"
        with open(path, "ab") as file:
            begin = file.tell()
            torch.save(WHOLE[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].clone(), file)
            places[MetadataIndex("w", torch.Size(offsets))] = _StorageInfo(path.name, begin, file.tell() - begin)
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        files[path.name] = hash_file(path)
    write_manifest(tmp_path, files, {})
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), WHOLE.size(), chunks)
    return tmp_path, Metadata({"w": entry}, storage_data=places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offsets, sizes", [((0, 0), (12, 6)), ((3, 1), (6, 4)), ((5, 2), (7, 4)), ((6, 2), (3, 4))])
def test_any_box_of_a_stored_tensor_can_be_read(stored, offsets, sizes, dtype):
    folder, index = stored
    place = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
    for target in (torch.full(sizes, 7.0, dtype=dtype), torch.full(sizes[::-1], 7.0, dtype=dtype).t()):
        read_pieces([Piece("w", (12, 6), offsets, target)], folder, index)
        assert torch.equal(target, WHOLE[place].to(dtype))


def test_padding_that_is_not_stored_becomes_zero_and_anything_else_that_is_missing_an_error(stored):
    folder, index = stored
    target = torch.full((14, 6), 7.0)
    read_pieces([Piece("w", (14, 6), (0, 0), target, padded=True)], folder, index)
    assert torch.equal(target[:12], WHOLE) and not target[12:].any()
    for piece, message in (
        (Piece("w", (14, 6), (0, 0), target), "the checkpoint has one of shape"),
        (Piece("w", (12, 7), (0, 0), target, padded=True), "not of this model"),
        (Piece("v", (14, 6), (0, 0), target), "no such tensor"),
    ):
        with pytest.raises(DamagedCheckpointError, match=message):
            read_pieces([piece], folder, index)
    index.state_dict_metadata["w"].chunks.pop()
    with pytest.raises(DamagedCheckpointError, match="44 of 72 elements of w are stored"):
        read_pieces([Piece("w", (12, 6), (0, 0), torch.zeros(12, 6))], folder, index)


def test_a_changed_bit_anywhere_is_noticed(stored):
    folder, index = stored
    piece = Piece("w", (12, 6), (0, 0), torch.zeros(12, 6))
    for name in ("__0_0.distcp", "__1_0.distcp"):
        path = folder / name
        content = path.read_bytes()
        for place in (40, len(content) // 2, len(content) - 5):
            path.write_bytes(content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :])
            with pytest.raises(DamagedCheckpointError, match=f"{name} is not what was written .its {HASH}"):
                read_pieces([piece], folder, index)
        for rest in (b"", content[:100]):
            path.write_bytes(rest)
            with pytest.raises(DamagedCheckpointError, match=f"{name} has {len(rest)} bytes instead of"):
                read_pieces([piece], folder, index, verify=False)
        path.write_bytes(content)
    read_pieces([piece], folder, index)
    assert torch.equal(piece.tensor, WHOLE)
