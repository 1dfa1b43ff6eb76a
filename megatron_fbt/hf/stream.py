"""Weights from a checkpoint into safetensors files, some megabytes at a time."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Dict, Iterator, List, Optional, Sequence, TextIO, Tuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from megatron_fbt.data.progress import duration
from megatron_fbt.errors import CheckpointError, ConfigError
from megatron_fbt.hf.weights import RowMap

PIECE_BYTES = 16 << 20
"""Of one read, in float32; a few of these are in memory at once."""
INDEX_FILE = "model.safetensors.index.json"
_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class ShardPlan:
    """Which file holds which tensor.

    Attributes:
        files: Tensors of each file, in the order of the file.
        index: Content of the index file; None where there is one file.
        total_bytes: Of all tensors.
    """

    files: Dict[str, List[RowMap]]
    index: Optional[dict]
    total_bytes: int


def plan_shards(row_maps: Sequence[RowMap], dtype: torch.dtype, max_shard_size: str) -> ShardPlan:
    """Distribute tensors over files; one that is larger than max_shard_size has a file of its own.

    Raises:
        ConfigError: max_shard_size cannot be read.
    """
    by_name = {row_map.name: row_map for row_map in row_maps}
    shapes = {name: torch.empty(row_map.shape, dtype=dtype, device="meta") for name, row_map in by_name.items()}
    try:
        split = split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ConfigError(
            f"max_shard_size={max_shard_size!r}: no size; give a number and a unit, such as 5GB"
        ) from error
    files = {name: [by_name[tensor] for tensor in sorted(names)] for name, names in split.filename_to_tensors.items()}
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None
    return ShardPlan(files, index, sum(tensor.numel() for tensor in shapes.values()) * dtype.itemsize)


def write_weights(source, plan: ShardPlan, dtype: torch.dtype, folder: Path, stream: Optional[TextIO] = None) -> None:
    """Write all files of a plan; memory does not grow with the model.

    Args:
        source: A TensorReader or HeldTensors.
        plan: From plan_shards.
        dtype: Number format of every tensor.
        folder: Where the files go.
        stream: Where progress is shown; None = standard error.

    Raises:
        CheckpointError: The source cannot be read, or has a value that dtype cannot hold.
        OSError: The folder cannot be written.
    """
    progress = ByteProgress(plan.total_bytes, stream)
    for name, row_maps in plan.files.items():
        with open(folder / name, "wb") as file:
            _write_file(file, source, row_maps, dtype, progress)
    if plan.index is not None:
        text = json.dumps(plan.index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX_FILE).write_text(text, encoding="utf-8")
    progress.end()


def _write_file(file: BinaryIO, source, row_maps: List[RowMap], dtype: torch.dtype, progress: "ByteProgress") -> None:
    """One safetensors file: length of the header, header, elements."""
    header: Dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for row_map in row_maps:
        begin, end = end, end + torch.Size(row_map.shape).numel() * dtype.itemsize
        entry = {"dtype": _TYPE_NAMES[dtype], "shape": list(row_map.shape), "data_offsets": [begin, end]}
        header[row_map.name] = entry
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for row_map in row_maps:
        for rows in _pieces(source, row_map):
            exported = _converted(row_map, rows, dtype)
            file.write(memoryview(exported.view(-1).view(torch.uint8).numpy()))
            progress.add(exported.nbytes)


def _pieces(source, row_map: RowMap) -> Iterator[Tensor]:
    """The rows of an exported tensor in order, a few at a time."""
    most = max(1, PIECE_BYTES // (4 * torch.Size(row_map.columns).numel()))
    for start, stop in row_map.rows:
        for low in range(start, stop, most):
            yield source.rows(row_map.source, low, min(low + most, stop))


def _converted(row_map: RowMap, rows: Tensor, dtype: torch.dtype) -> Tensor:
    exported = row_map.apply(rows.to("cpu"), dtype).contiguous()
    if dtype == torch.float16 and rows.dtype != dtype and bool((exported.isinf() & rows.isfinite()).any()):
        largest = rows.abs().max().item()
        raise CheckpointError(f"{row_map.source}: float16 cannot hold {largest:g}. Export in bf16 or fp32.")
    return exported


class ByteProgress:
    """Share, rate and remaining time of a known number of bytes; nothing for the first seconds.

    Args:
        total: Bytes of the whole work.
        stream: Where to write; None = standard error.
        quiet_s: Seconds during which nothing is shown.
        interval_s: Seconds between two lines where the stream is no terminal.
    """

    def __init__(self, total: int, stream: Optional[TextIO] = None, quiet_s: float = 3.0, interval_s: float = 10.0):
        self._total, self._stream, self._interval = total, sys.stderr if stream is None else stream, interval_s
        self._begin = time.monotonic()
        self._next = self._begin + quiet_s
        self._done, self._shown = 0, False

    def add(self, count: int) -> None:
        """So many bytes more are done."""
        self._done += count
        now = time.monotonic()
        if now < self._next:
            return
        rate = self._done / (now - self._begin)
        line = f"{self._done / self._total:4.0%}  {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB"
        line += f"  {rate / 1e6:,.0f} MB/s  ETA {duration((self._total - self._done) / rate)}"
        terminal, self._shown = self._stream.isatty(), True
        self._stream.write(f"\r\033[K{line}" if terminal else line + "\n")
        self._stream.flush()
        self._next = now + (0.2 if terminal else self._interval)

    def end(self) -> None:
        """Clear the line."""
        if self._shown and self._stream.isatty():
            self._stream.write("\r\033[K")


def total_parameters(row_maps: Sequence[RowMap]) -> int:
    """Elements of all exported tensors."""
    shapes: List[Tuple[int, ...]] = [row_map.shape for row_map in row_maps]
    return sum(torch.Size(shape).numel() for shape in shapes)
