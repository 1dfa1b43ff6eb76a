"""Raw text files: reading them, and judging each record.

A record is one line of a JSON Lines file, one row of a Parquet file (see parquet.py) or one whole text file. Nothing
here keeps more than a chunk in memory.
"""

import gzip
import json
import zlib
from typing import Callable, Iterator, List, Optional, Sequence, Tuple, TypeVar

from megatron_fbt.data.input_files import PARQUET_SUFFIX, InputFile, input_file
from megatron_fbt.errors import ConfigError, DataError

Parsed = TypeVar("Parsed")

BLOCK = 1 << 20
"""Bytes read at once."""
_MAX_WINDOW = 1 << 31
"""Of a .zst file, in bytes: all that ``zstd --long=31`` can ask for."""

EMPTY_TEXT = "empty_text"
"""The one reason to leave out a record that is no fault: its text is empty or blank."""


class BadRecord(ValueError):
    """A record that cannot become a document.

    Attributes:
        kind: A word for reports, e.g. ``invalid_json``.
    """

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind


def read_blocks(file: InputFile) -> Iterator[Tuple[bytes, int]]:
    """Decompressed blocks of a file, each with the number of bytes taken from disk so far.

    Raises:
        DataError: The file cannot be read, or its compressed content is cut or damaged.
    """
    try:
        with open(file.path, "rb") as stream:
            if file.path.endswith((".gz", ".zst")) and not stream.peek(1):
                raise EOFError
            if file.path.endswith(".gz"):
                yield from _gzip_blocks(stream)
            elif file.path.endswith(".zst"):
                yield from _zstd_blocks(stream)
            else:
                while block := stream.read(BLOCK):
                    yield block, _position(stream)
    except EOFError as error:
        raise DataError(f"input {file.path}: the compressed file is cut off ({file.size} bytes on disk)") from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"input {file.path}: the compressed file is damaged: {error}") from error
    except OSError as error:
        raise DataError(f"input {file.path}: cannot be read: {error}") from error


def _position(stream) -> int:
    """Bytes taken from disk so far; 0 for a pipe."""
    return stream.tell() if stream.seekable() else 0


def _gzip_blocks(stream) -> Iterator[Tuple[bytes, int]]:
    with gzip.GzipFile(fileobj=stream) as unpacked:
        while block := unpacked.read(BLOCK):
            yield block, _position(stream)


def _zstd_blocks(stream) -> Iterator[Tuple[bytes, int]]:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("reading .zst files needs the package zstandard: pip install zstandard") from error
    frame, pending = None, b""
    try:
        while True:
            block = pending or stream.read(BLOCK // 8)
            if not block:
                break
            frame = frame or zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
            yield frame.decompress(block), _position(stream)
            pending = b""
            if frame.eof:
                pending, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise zlib.error(str(error)) from error
    if frame is not None:
        raise EOFError


def read_lines(file: InputFile) -> Iterator[Tuple[bytes, int]]:
    """Lines of a file, line ends included, each with the number of bytes taken from disk so far."""
    parts: List[bytes] = []
    position = 0
    for block, position in read_blocks(file):
        lines = block.split(b"\n")
        if len(lines) == 1:
            parts.append(block)
            continue
        parts.append(lines[0])
        yield b"".join(parts) + b"\n", position
        for line in lines[1:-1]:
            yield line + b"\n", position
        parts = [lines[-1]]
    rest = b"".join(parts)
    if rest:
        yield rest, position


def read_line_blocks(file: InputFile, size: int) -> Iterator[Tuple[bytes, int]]:
    """Blocks of whole lines, of about ``size`` bytes each, with the number of bytes taken from disk so far.

    Only the last line of a file may be without its line end.
    """
    parts: List[bytes] = []
    held, position = 0, 0
    for block, position in read_blocks(file):
        begin = 0
        while (end := block.find(b"\n", begin + max(size - held, 0)) + 1) > 0:
            parts.append(block[begin:end])
            yield b"".join(parts), position
            parts, held, begin = [], 0, end
        parts.append(block[begin:])
        held += len(parts[-1])
    rest = b"".join(parts)
    if rest:
        yield rest, position


def parse_lines(files: Sequence[InputFile], parse: Callable[[bytes], Parsed]) -> Iterator[Tuple[int, Parsed]]:
    """Each line of the files of data.paths parsed, with the bytes read so far, over all files.

    Args:
        files: In order.
        parse: Of a line with its line end; raises BadRecord.

    Raises:
        DataError: A file cannot be read, or a line is bad: naming file and line.
    """
    before = 0
    for file in files:
        for number, (line, position) in enumerate(read_lines(file), 1):
            try:
                parsed = parse(line)
            except BadRecord as error:
                raise DataError(f"data.paths {file.path}, line {number}: {error} ({error.kind})") from error
            except DataError as error:
                raise DataError(f"data.paths {file.path}, line {number}: {error}") from error
            yield before + position, parsed
        before += file.size


def parse_line(line: bytes, keys: Sequence[str]) -> List[Optional[str]]:
    """The texts of one JSON Lines record.

    Args:
        line: With its line end.
        keys: Names of the wanted texts.

    Returns:
        One text for each key; None where the text is empty or blank.

    Raises:
        BadRecord: The line is not exactly one JSON object, ended by a newline, with a text under each key.
    """
    record = parse_object(line)
    return [_text_under(record, key) for key in keys]


def parse_object(line: bytes) -> dict:
    """The object of one JSON Lines record.

    Raises:
        BadRecord: The line is not exactly one JSON object, ended by a newline.
    """
    if not line.strip():
        raise BadRecord("blank_line", "the line is blank")
    if line.startswith(b"\xef\xbb\xbf"):
        raise BadRecord("byte_order_mark", "the line begins with a byte-order mark; save the file as UTF-8 without one")
    try:
        record = _load(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecord("invalid_utf8", f"not UTF-8: {error.reason} at byte {error.start + 1} of the line") from error
    except (ValueError, RecursionError) as error:
        raise BadRecord("invalid_json", f"not one JSON object: {error}") from error
    if line.endswith(b"\r\n"):
        raise BadRecord("crlf", "the line ends with CR LF; convert the file to LF line ends")
    if not line.endswith(b"\n"):
        raise BadRecord("no_final_newline", "the last line has no line end: the file may be cut; if not, add one")
    if not isinstance(record, dict):
        raise BadRecord("not_an_object", f"the line holds a JSON {type(record).__name__}, not an object")
    return record


def _load(text: str):
    try:
        return json.loads(text)
    except ValueError:  # perhaps an integer of more digits than Python converts
        return json.loads(text, parse_int=float)


def _text_under(record: dict, key: str) -> Optional[str]:
    if key not in record:
        raise BadRecord("key_missing", f"the object has no key '{key}'")
    text = record[key]
    if not isinstance(text, str):
        raise no_text(key, text, json.dumps(text))
    return check_text(text)


def no_text(key: str, value, shown: str) -> BadRecord:
    """What is wrong with a value that is no string."""
    kind = "text_null" if value is None else "text_not_a_string"
    return BadRecord(kind, f"the value of '{key}' is {shown[:40]}, not a string")


def check_text(text: str) -> Optional[str]:
    """The text itself, or None if it is empty or blank.

    Raises:
        BadRecord: It holds a NUL or a lone surrogate.
    """
    if "\0" in text:
        raise BadRecord("nul_character", "the text holds a NUL character")
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecord("lone_surrogate", f"the text holds a lone surrogate at character {error.start + 1}") from error
    return None if not text or text.isspace() else text


def read_text_file(path: str) -> Optional[str]:
    """The text of a whole file (UTF-8, or compressed UTF-8), or None if it is empty or blank.

    Raises:
        BadRecord: It is not UTF-8 text.
        DataError: It cannot be read.
    """
    content = b"".join(block for block, _ in read_blocks(input_file(path)))
    try:
        return check_text(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecord("invalid_utf8", f"not UTF-8: {error.reason} at byte {error.start + 1}") from error


def iterate_documents(files: Sequence[InputFile], input_format: str, key: str) -> Iterator[str]:
    """The texts of all good records in order; bad and blank ones are left out (for training a tokenizer)."""
    for file in files:
        for read in _record_readers(file, input_format, key):
            try:
                text = read()
            except BadRecord:
                continue
            if text is not None:
                yield text


def _record_readers(file: InputFile, input_format: str, key: str) -> Iterator[Callable[[], Optional[str]]]:
    """What gives the text of each record of a file."""
    if input_format == "files":
        yield lambda: read_text_file(file.path)
    elif file.path.endswith(PARQUET_SUFFIX):
        from megatron_fbt.data.parquet import parse_cell, read_rows, rows_of

        for content, count, _ in read_rows(file, [key]):
            for cells in rows_of(content, [key], count):
                yield lambda cells=cells: parse_cell(cells[0], key)
    else:
        for line, _ in read_lines(file):
            yield lambda line=line: parse_line(line, [key])[0]
