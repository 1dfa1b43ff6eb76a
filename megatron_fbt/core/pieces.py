"""Boxes of the whole model's tensors that one rank holds: what checkpoints are written from and read into.

Megatron-Core tells where a parameter lies in the tensors of the whole model. An optimizer that is sharded over
data-parallel ranks holds flat ranges of a parameter; each range is a few boxes of it.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Tuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

Box = Tuple[Tuple[int, ...], Tuple[int, ...]]
"""First index and sizes."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, in this rank's memory."""

    name: str
    """Of the tensor."""
    size: Tuple[int, ...]
    """Of the whole tensor."""
    offsets: Tuple[int, ...]
    """The box's first index."""
    tensor: Tensor
    """Its elements: a view of what the run works with."""
    first_copy: bool = True
    """Whether it is the one to be written, of the equal ones on tensor-parallel ranks and pipeline stages."""
    replicated: bool = False
    """Whether all data-parallel ranks hold it."""
    padded: bool = False
    """A checkpoint may hold more or fewer rows: those of the padding."""

    @property
    def key(self) -> Tuple[str, Tuple[int, ...]]:
        """What no other piece has."""
        return self.name, self.offsets


def boxes(begin: int, end: int, shape: Tuple[int, ...]) -> Iterator[Box]:
    """The boxes that elements begin to end of a tensor make up, in their order; each lies in one stretch.

    Args:
        begin: The first element, counted row after row.
        end: The one after the last.
        shape: Of the tensor.
    """
    if begin >= end:
        return
    if len(shape) < 2:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:
        yield from _in_row(last, begin - last * row, end - last * row, shape)
        return
    yield from _in_row(first - 1, begin - (first - 1) * row, row if begin < first * row else 0, shape)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(last, 0, end - last * row, shape)


def _in_row(number: int, begin: int, end: int, shape: Tuple[int, ...]) -> Iterator[Box]:
    for offsets, sizes in boxes(begin, end, shape[1:]):
        yield (number, *offsets), (1, *sizes)


def weight_pieces(sharded: Dict[str, Any]) -> Dict[str, List[Piece]]:
    """Pieces of the weights that Megatron-Core describes, by parameter.

    Args:
        sharded: A module's sharded_state_dict. What is no tensor in it (other backends' extra state) is left out.
    """
    found: Dict[str, List[Piece]] = {}
    for name, entry in sharded.items():
        for part in _parts(entry):
            tensor = part.data.detach().view(_box_shape(part))
            found.setdefault(name, []).append(_piece(part, part.key, part.global_offset, tensor))
    return found


def range_pieces(entry: Any, prefix: str, begin: int, values: Tensor, sharded: bool) -> List[Piece]:
    """Pieces of a tensor that belongs to a weight, of which this rank has a flat range.

    Args:
        entry: Megatron-Core's description of the weight.
        prefix: Before the weight's name.
        begin: Where the range begins in the flattened weight.
        values: [length of the range].
        sharded: Whether other data-parallel ranks have other ranges, not copies of this one.
    """
    found, end = [], begin + values.numel()
    for part in _parts(without_memory(entry)):
        start = part.data.storage_offset()
        low, high = max(begin, start), min(end, start + part.data.numel())
        at = low - begin
        for offsets, sizes in boxes(low - start, high - start, _box_shape(part)):
            place = tuple(a + b for a, b in zip(part.global_offset, offsets, strict=True))
            tensor = values[at : at + math.prod(sizes)].view(sizes)
            piece = _piece(part, prefix + part.key, place, tensor)
            found.append(dataclasses.replace(piece, replicated=False) if sharded else piece)
            at += tensor.numel()
    return found


def pieces_to_write(pieces: Iterable[Piece], data_rank: int, data_size: int) -> List[Piece]:
    """Those that this rank writes: each box once in the whole layout, copies shared out over data-parallel ranks.

    Args:
        pieces: This rank's, in an order that is the same on all data-parallel ranks for those that they all hold.
        data_rank: This rank's data-parallel rank.
        data_size: Number of them.
    """
    loads, own = [0] * data_size, []
    for piece in pieces:
        writer = data_rank
        if piece.replicated:
            writer = loads.index(min(loads))
            loads[writer] += piece.tensor.nbytes
        if piece.first_copy and writer == data_rank:
            own.append(piece)
    return own


def _parts(entry: Any) -> List[ShardedTensor]:
    """The tensors that Megatron-Core makes of a parameter: one, or several where matrices are stacked in it."""
    if isinstance(entry, ShardedTensorFactory):
        entry = entry.build()
    if isinstance(entry, dict):
        entry = list(entry.values())
    if isinstance(entry, (list, tuple)):
        return [part for inner in entry for part in _parts(inner)]
    return [entry] if isinstance(entry, ShardedTensor) else []


def without_memory(entry: Any) -> Any:
    """The description with a tensor that has no elements, so that parts of it tell where they begin."""
    return dataclasses.replace(entry, data=torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta"))


def _box_shape(part: ShardedTensor) -> Tuple[int, ...]:
    return (1,) * part.prepend_axis_num + tuple(part.local_shape)


def _piece(part: ShardedTensor, name: str, offsets: Tuple[int, ...], tensor: Tensor) -> Piece:
    """Megatron-Core numbers copies by (..., data-parallel rank); a plain number has no such part."""
    copies = part.replica_id if isinstance(part.replica_id, tuple) else (part.replica_id, None)
    first = not any(copies[:-1])
    size = tuple(part.global_shape)
    return Piece(name, size, tuple(offsets), tensor, first, copies[-1] is not None, part.allow_shape_mismatch)
