"""The input of preprocessing in pieces that are sent to worker processes as they were read."""

from dataclasses import dataclass, replace
from typing import Iterator, Optional, Sequence, Tuple

from megatron_fbt.data.input_files import PARQUET_SUFFIX, InputFile
from megatron_fbt.data.inputs import read_line_blocks
from megatron_fbt.data.parquet import read_rows

CHUNK_BYTES = 1 << 18
CHUNK_FILES = 512


@dataclass(frozen=True)
class Chunk:
    """Records that one call of a worker encodes.

    Attributes:
        path: The file of the lines or rows; empty for whole files.
        first: Number of the first line or row, from 1.
        lines: Whole lines, as read.
        rows: Rows of a Parquet file, see parquet.read_rows.
        count: Number of rows.
        files: Paths of whole files.
        progress: Bytes on disk that all chunks up to this one have used.
    """

    path: str = ""
    first: int = 0
    lines: bytes = b""
    rows: Optional[bytes] = None
    count: int = 0
    files: Tuple[str, ...] = ()
    progress: int = 0

    @property
    def unit(self) -> str:
        """What a record is called."""
        return "line" if self.rows is None else "row"

    def place(self, number: int) -> str:
        """File, and line or row, of the record of a number from 0."""
        return self.files[number] if self.files else f"{self.path}, {self.unit} {self.first + number}"

    def without_content(self) -> "Chunk":
        """The chunk's place in the input."""
        return replace(self, lines=b"", rows=None, files=())

    def split_lines(self) -> Iterator[bytes]:
        """Each line, its line end included."""
        parts = self.lines.split(b"\n")
        last = parts.pop()
        for part in parts:
            yield part + b"\n"
        if last:
            yield last


def make_chunks(files: Sequence[InputFile], input_format: str, keys: Sequence[str]) -> Iterator[Chunk]:
    """Cut the input into chunks, in order; the cuts depend on the input alone."""
    done = 0
    if input_format == "files":
        yield from _chunks_of_files(files)
        return
    for file in files:
        first = 1
        if file.path.endswith(PARQUET_SUFFIX):
            yield from _chunks_of_rows(file, keys, done)
        else:
            for lines, position in read_line_blocks(file, CHUNK_BYTES):
                yield Chunk(file.path, first, lines, progress=done + position)
                first += lines.count(b"\n")
        done += file.size


def _chunks_of_rows(file: InputFile, keys: Sequence[str], done: int) -> Iterator[Chunk]:
    first = 1
    for rows, count, position in read_rows(file, keys):
        yield Chunk(file.path, first, rows=rows, count=count, progress=done + position)
        first += count


def _chunks_of_files(files: Sequence[InputFile]) -> Iterator[Chunk]:
    paths, size, done = [], 0, 0
    for file in files:
        paths.append(file.path)
        size += file.size
        done += file.size
        if size >= CHUNK_BYTES or len(paths) >= CHUNK_FILES:
            yield Chunk(files=tuple(paths), progress=done)
            paths, size = [], 0
    if paths:
        yield Chunk(files=tuple(paths), progress=done)
