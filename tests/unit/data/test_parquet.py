"""Parquet files that are damaged: nothing of them is lost or made up in silence."""

import pyarrow
import pyarrow.parquet
import pytest

from megatron_fbt.data import parquet
from megatron_fbt.data.inputs import InputFile
from megatron_fbt.data.parquet import read_rows, rows_of
from megatron_fbt.errors import DataError

TEXTS = [f"text {number}" for number in range(60)]
DAMAGE = {  # what is in the place of what, and what the error says
    "a page has fewer rows": (b"\x2c\x15\x28\x15", b"\x2c\x15\x20\x15", r"row group 0 \(from 0\) has 16 rows, .* 20"),
    "the whole has more rows": (b"\x16\x78\x19", b"\x16\x7a\x19", "sum of its row groups has 60 rows, .* says 61"),
    "a byte of a page": (b"text 7", b"text 8", "integrity"),
    "a name that is not UTF-8": (b"\x18\x04text", b"\x18\x04\xf4ext", "utf-8"),
    "a column said to be without nulls": (b"\x25\x02\x18\x04text", b"\x25\x00\x18\x04text", "[Ll]evel"),
}


def write(path, content=b"", checksums=False, **columns):
    table = pyarrow.table({"text": TEXTS, **columns})
    options = {"row_group_size": 20, "compression": "none", "use_dictionary": False}
    pyarrow.parquet.write_table(table, path, write_page_checksum=checksums, **options)
    return InputFile(str(path), path.stat().st_size)


def read(file, keys=("text",)):
    return [cells for content, count, _ in read_rows(file, keys) for cells in rows_of(content, keys, count)]


@pytest.mark.parametrize("few", [1, 1 << 30])
@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_told_with_the_file_and_never_read_past(tmp_path, monkeypatch, case, few):
    monkeypatch.setattr(parquet, "_FEW_ROWS", few)  # the sizes are taken of the group, or column by column
    path = tmp_path / "b.parquet"
    good, bad, message = DAMAGE[case]
    file = write(path, checksums=case == "a byte of a page")
    content = path.read_bytes()
    assert read(file) == [[text.encode()] for text in TEXTS] and good in content
    path.write_bytes(content.replace(good, bad, 1))
    with pytest.raises(DataError, match=rf"input {path}: the Parquet file is .*damaged.*{message}"):
        read(file)


@pytest.mark.parametrize("few", [1, 1 << 30])
def test_other_columns_change_neither_rows_nor_their_order(tmp_path, monkeypatch, few):
    monkeypatch.setattr(parquet, "_FEW_ROWS", few)
    monkeypatch.setattr(parquet, "CHUNK_BYTES", 40)
    wide = {"a": [{"b": text * 9, "text": 1} for text in TEXTS], "z": TEXTS}
    file = write(tmp_path / "b.parquet", **wide)
    assert read(file, ["z", "none", "text"]) == [[text.encode(), parquet.NoColumn, text.encode()] for text in TEXTS]
    assert max(count for _, count, _ in read_rows(file, ["z"])) < 9


def test_cells_that_python_cannot_hold_are_no_texts_and_no_traceback(tmp_path):
    file = write(tmp_path / "b.parquet", when=pyarrow.array([2**31 - 1, None] * 30, pyarrow.date32()))
    assert read(file, ["when"])[:2] == [[pyarrow.date32()], [None]]
