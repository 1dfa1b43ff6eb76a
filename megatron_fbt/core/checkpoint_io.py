"""Reading Megatron-Core's distributed checkpoint format; what is read is checked first, and none of it is executed."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterable, Iterator, List, NamedTuple, Tuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_fbt.core.checkpoint_write import COMMON_FILE, FORMAT_FILE
from megatron_fbt.core.manifest import (
    HashingReader,
    Manifest,
    check_content,
    check_entry,
    check_size,
    check_sizes,
    read_into,
    read_manifest,
)
from megatron_fbt.core.pieces import Piece
from megatron_fbt.core.safe_index import INDEX, read_index
from megatron_fbt.core.tensor_archive import FileSlice, find_elements, memory_of
from megatron_fbt.errors import CheckpointError, DamagedCheckpointError

TENSORS = ".distcp"
"""Ending of the names of files that hold tensors."""
Read = Callable[[int, memoryview], None]
"""Fills memory with a file's bytes from a place on."""


class _Stretch(NamedTuple):
    """What a chunk in a file and a piece have in common."""

    place: Any
    """File, begin and length of the chunk's archive."""
    sizes: Tuple[int, ...]
    """Of the chunk."""
    dtype: torch.dtype
    source: Tuple[slice, ...]
    """In the chunk."""
    target: Tensor
    """Part of the piece."""


@torch.no_grad()
def read_pieces(pieces: Iterable[Piece], folder: Path, index: Metadata, verify: bool = True) -> None:
    """Read pieces into their place, whatever layout wrote them; needs no process group.

    Every file is read once, and hashed from where it was read to. After a failure what was read so far is in place: the
    caller must not go on with it.

    Args:
        pieces: what this rank is to have. Rows of padded ones that the checkpoint does not have become 0.
        folder: the checkpoint.
        index: of it.
        verify: compare the hashes of the files that this rank reads, whole files.

    Raises:
        DamagedCheckpointError: a file is damaged, or the tensors are not those of this model.
    """
    with _as_checkpoint_error(f"cannot read the checkpoint {folder}", "resume from an older checkpoint"):
        manifest, by_file = read_manifest(folder), {}
        for piece in pieces:
            for stretch in _stretches(piece, folder, index):
                by_file.setdefault(stretch.place.relative_path, []).append(stretch)
        for name, stretches in sorted(by_file.items()):
            stretches.sort(key=lambda stretch: stretch.place.offset)
            check_size(folder, name, manifest)
            with open(folder / name, "rb", buffering=0) as file, _reading(file, folder, name, manifest, verify) as read:
                for stretch in stretches:
                    _read_stretch(file, read, stretch)


@contextlib.contextmanager
def _reading(file: BinaryIO, folder: Path, name: str, manifest: Manifest, verify: bool) -> Iterator[Read]:
    """Read a file, and see that it is what was written.

    Yields:
        What fills memory from a place of the file on.

    Raises:
        DamagedCheckpointError: at the end, if the file is not what was written.
    """
    if not verify:
        yield lambda place, memory: read_into(file, place, memory)
        return
    reader = HashingReader(file)
    try:
        yield reader.read_into
    except Exception:
        check_entry(folder, name, manifest, reader.finish())  # the damage is the better reason
        raise
    check_entry(folder, name, manifest, reader.finish())


def _stretches(piece: Piece, folder: Path, index: Metadata) -> List[_Stretch]:
    """Where a piece is stored; padding that is not becomes 0.

    Raises:
        DamagedCheckpointError: the checkpoint does not have it.
    """
    entry = index.state_dict_metadata.get(piece.name)
    fixed = slice(1, None) if piece.padded else slice(None)
    same = isinstance(entry, TensorStorageMetadata) and tuple(entry.size)[fixed] == piece.size[fixed]
    if not same:
        stored = "no such tensor" if entry is None else f"one of shape {tuple(getattr(entry, 'size', ()))}"
        raise DamagedCheckpointError(
            f"{folder} is not of this model: {piece.name} has the shape {piece.size}, the checkpoint has {stored}; "
            "resume from an older checkpoint"
        )
    found: List[_Stretch] = []
    for chunk in entry.chunks:
        bounds = [
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(piece.offsets, piece.tensor.shape, chunk.offsets, chunk.sizes, strict=True)
        ]
        if any(low >= high for low, high in bounds):
            continue
        source = tuple(slice(low - a, high - a) for (low, high), a in zip(bounds, chunk.offsets))
        target = piece.tensor[tuple(slice(low - a, high - a) for (low, high), a in zip(bounds, piece.offsets))]
        place = index.storage_data[MetadataIndex(piece.name, chunk.offsets)]
        found.append(_Stretch(place, tuple(chunk.sizes), entry.properties.dtype, source, target))
    covered = sum(stretch.target.numel() for stretch in found)
    if covered == piece.tensor.numel():
        return found
    if not piece.padded:
        raise DamagedCheckpointError(
            f"{folder}: {covered:,} of {piece.tensor.numel():,} elements of {piece.name} are stored; resume from an "
            "older checkpoint"
        )
    piece.tensor.zero_()
    return found


def _read_stretch(file: BinaryIO, read: Read, stretch: _Stretch) -> None:
    """Read into the target; straight from the file into its memory where the bytes lie alike."""
    place, sizes, dtype, source, target = stretch
    archive = FileSlice(file, place.offset, place.length)
    begin = find_elements(archive, sizes, math.prod(sizes) * dtype.itemsize, check=False)
    if begin is None:
        target.copy_(torch.load(archive, map_location="cpu", weights_only=True)[source])
        return
    rows = source[0] if sizes else slice(0, 1)
    row = math.prod(sizes[1:])
    first = place.offset + begin + rows.start * row * dtype.itemsize
    whole_rows = all(part == slice(0, size) for part, size in zip(source[1:], sizes[1:]))
    if whole_rows and target.dtype == dtype and target.is_cpu and target.is_contiguous():
        read(first, memory_of(target))
        return
    part = torch.empty((rows.stop - rows.start, *sizes[1:]) if sizes else (), dtype=dtype)
    read(first, memory_of(part))
    target.copy_(part[(slice(None), *source[1:])] if sizes else part)


def read_tensors(folder: Path, prefix: str = "", without: str = "") -> Dict[str, torch.Tensor]:
    """Read whole tensors to the CPU; needs no process group.

    Args:
        folder: the checkpoint.
        prefix: read the tensors whose names begin with this.
        without: and do not begin with this ("" = no restriction).

    Raises:
        DamagedCheckpointError: a file is missing or damaged.
    """
    index = check_files(folder)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
        if not (without and name.startswith(without))
    }
    pieces = [Piece(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]
    read_pieces(pieces, folder, index)
    return tensors


def check_files(folder: Path, verify: bool = True) -> Metadata:
    """See that every file of a checkpoint is there in its size, and that the small ones can be read.

    Args:
        folder: the checkpoint.
        verify: compare the hashes of those without tensors, too.

    Returns:
        The index.

    Raises:
        DamagedCheckpointError: naming the file.
    """
    manifest = check_sizes(folder)
    for name in {INDEX, COMMON_FILE, FORMAT_FILE, *manifest.files}:
        if not name.endswith(TENSORS):
            (check_content if verify else check_size)(folder, name, manifest)
    with _as_checkpoint_error(f"{folder / FORMAT_FILE} cannot be read", "resume from an older checkpoint"):
        json.loads((folder / FORMAT_FILE).read_text())
    with _as_checkpoint_error(f"{folder / COMMON_FILE} cannot be read", "resume from an older checkpoint"):
        torch.load(folder / COMMON_FILE, map_location="cpu", weights_only=True)
    return read_index(folder)


@contextlib.contextmanager
def _as_checkpoint_error(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever a damaged file makes the libraries raise into one line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(f"{what}: {_reason(error)}; {remedy}") from error


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
