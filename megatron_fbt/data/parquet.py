"""Texts from the columns of Parquet files, some rows at a time."""

from typing import Any, Iterator, List, Optional, Sequence, Tuple

from megatron_fbt.data.inputs import BadRecord, InputFile, check_text, no_text
from megatron_fbt.errors import ConfigError, DataError

CHUNK_BYTES = 1 << 18
"""Bytes of text read at once, by the file's own statistics."""
MOST_ROWS = 1 << 13
_FEW_ROWS = 32
"""Rows that are worth a chunk, however few bytes of text they have."""
_BUFFER = 1 << 20
"""Bytes of a column read from the disk at once."""


class NoColumn:
    """Stands in the cells of a column that the file does not have."""


def read_rows(file: InputFile, keys: Sequence[str]) -> Iterator[Tuple[bytes, int, int]]:
    """The columns of a file, a few rows at a time.

    Args:
        file: A Parquet file.
        keys: Names of the columns; those that the file does not have are left out.

    Yields:
        The rows as an Arrow stream, their number, and the part of the file's bytes that they and all before make up.

    Raises:
        ConfigError: The package pyarrow is not installed.
        DataError: The file cannot be read, is cut or damaged, or has a column twice.
    """
    pyarrow, parquet = _import_pyarrow()
    options = {"pre_buffer": False, "buffer_size": _BUFFER, "memory_map": False, "page_checksum_verification": True}
    try:
        with parquet.ParquetFile(file.path, **options) as table:
            _check_rows("the sum of its row groups", _rows_of_groups(table.metadata), table.metadata.num_rows)
            total = max(table.metadata.num_rows, 1)
            names = [name for name in keys if name in table.schema_arrow.names]
            twice = [name for name in names if table.schema_arrow.names.count(name) > 1]
            if twice:
                raise DataError(f"it has several columns named '{twice[0]}'; rename all but one")
            done = 0
            for first, count in _batches(table, names):
                done += count
                yield _to_bytes(pyarrow, first), count, file.size * done // total
    except DataError as error:
        raise DataError(f"input {file.path}: {error}") from error
    except Exception as error:  # pyarrow raises whatever comes up for damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"input {file.path}: the Parquet file is cut off, damaged or unreadable: {reason}") from error


def _rows_of_groups(metadata) -> int:
    return sum(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))


def _check_rows(what: str, found: int, told: int) -> None:
    if found != told:
        raise DataError(f"the Parquet file is damaged: {what} has {found} rows, its footer says {told}; copy it again")


def _batches(table, names: List[str]) -> Iterator[Tuple[Any, int]]:
    if not names:  # every row lacks the key, which is for the reader of the rows to say
        for first in range(0, table.metadata.num_rows, MOST_ROWS):
            yield None, min(MOST_ROWS, table.metadata.num_rows - first)
        return
    for group in range(table.metadata.num_row_groups):
        told, found = table.metadata.row_group(group).num_rows, 0
        for batch in table.iter_batches(_rows_at_once(table, group, names), [group], names, use_threads=False):
            found += batch.num_rows
            yield batch, batch.num_rows
        _check_rows(f"row group {group} (from 0)", found, told)


def _rows_at_once(table, number: int, names: List[str]) -> int:
    group = table.metadata.row_group(number)
    size = group.total_byte_size
    if not 0 < size * _FEW_ROWS <= CHUNK_BYTES * group.num_rows:  # the other columns may be most of it
        # Asking for a column of a damaged footer ends the process inside pyarrow; reading a row of it raises instead.
        next(table.iter_batches(1, [number], names, use_threads=False), None)
        wanted = [i for i in range(group.num_columns) if table.schema.column(i).path.split(".")[0] in names]
        size = sum(group.column(i).total_uncompressed_size for i in wanted)
    return max(1, min(MOST_ROWS, CHUNK_BYTES * group.num_rows // max(size, 1)))


def _to_bytes(pyarrow, batch) -> bytes:
    if batch is None:
        return b""
    columns = [_as_binary(pyarrow, column) for column in batch.columns]
    batch = pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _as_binary(pyarrow, column):
    """Texts as bytes, because Parquet files may hold texts that are not UTF-8; other types as they are."""
    types = pyarrow.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_view = getattr(types, "is_string_view", lambda _: False)
    if types.is_string(column.type) or types.is_large_string(column.type) or is_view(column.type):
        return column.cast(pyarrow.large_binary())
    return column


def rows_of(content: bytes, keys: Sequence[str], count: int = 0) -> Iterator[List[Any]]:
    """The cells of each row, in the order of the keys.

    Args:
        content: See read_rows.
        keys: As given there.
        count: Number of rows, where no key is a column.
    """
    columns = {}
    if content:
        pyarrow, _ = _import_pyarrow()
        table = pyarrow.ipc.open_stream(content).read_all()
        columns, count = {name: _cells(table.column(name)) for name in table.column_names}, table.num_rows
    missing = [NoColumn] * count
    for cells in zip(*(columns.get(key, missing) for key in keys), strict=True):
        yield list(cells)


def _cells(column) -> List[Any]:
    try:
        return column.to_pylist()
    except (ArithmeticError, ValueError):  # such as dates beyond those of Python, and no texts in any case
        return [column.type if valid else None for valid in column.is_valid().to_pylist()]


def parse_cell(cell: Any, key: str) -> Optional[str]:
    """The text of a cell, or None if it is empty or blank.

    Raises:
        BadRecord: It is no text; the kinds are those of JSON Lines.
    """
    if cell is NoColumn:
        raise BadRecord("key_missing", f"the file has no column '{key}'")
    if not isinstance(cell, bytes):
        raise no_text(key, cell, repr(cell))
    try:
        return check_text(cell.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecord("invalid_utf8", f"not UTF-8: {error.reason} at byte {error.start + 1} of '{key}'") from error


def _import_pyarrow():
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("reading .parquet files needs the package pyarrow: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet
