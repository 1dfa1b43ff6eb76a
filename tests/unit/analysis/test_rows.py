"""Rows of token ids out of text and of indexed data sets."""

import numpy
import pytest
import torch

from megatron_fbt.analysis.rows import indexed_rows, text_rows
from megatron_fbt.data.indexed import IndexedWriter
from megatron_fbt.errors import ConfigError, DataError


class Letters:
    def __call__(self, text, **options):
        return type("Encoding", (), {"input_ids": [ord(letter) - ord("a") for letter in text]})


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "held_out.txt"
    path.write_text("abcdefghijk")
    return str(path)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    prefix = str(tmp_path_factory.mktemp("data") / "corpus")
    writer = IndexedWriter(prefix, 50)
    documents = [[1, 2, 3, 9], [4, 9], [5, 6, 7, 8, 9], [10, 9, 11, 9]]
    ids = numpy.array([token for document in documents for token in document])
    writer.add(ids, numpy.array([len(document) for document in documents]))
    writer.finish()
    writer.publish()
    return prefix


def test_text_is_cut_into_whole_rows(text):
    rows = text_rows(Letters(), 20, text, 10, 4, seed=0)
    assert rows.input_ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (rows.document_starts, rows.available) == (None, 2)


def test_the_seed_picks_rows(text):
    picks = {tuple(text_rows(Letters(), 20, text, 2, 2, seed=seed).input_ids.flatten().tolist()) for seed in range(9)}
    assert len(picks) > 1
    assert all(len(pick) == 4 and pick[0] % 2 == 0 and pick[2] > pick[1] == pick[0] + 1 for pick in picks)


def test_rows_of_a_data_set_know_where_documents_start(prefix):
    rows = indexed_rows(prefix, 50, None, None, 10, 5, seed=0)
    assert rows.input_ids.tolist() == [[1, 2, 3, 9, 4], [9, 5, 6, 7, 8], [9, 10, 9, 11, 9]]
    starts = [[True, False, False, False, True], [False, True, False, False, False], [False, True, False, False, False]]
    assert rows.document_starts.tolist() == starts
    by_end = indexed_rows(prefix, 50, None, 9, 10, 5, seed=0).document_starts
    starts[2][3] = True
    assert by_end.tolist() == starts


def test_the_validation_part_of_the_split(prefix):
    rows = indexed_rows(prefix, 50, "2,1,1", 9, 10, 2, seed=0)
    assert rows.input_ids.tolist() == [[5, 6], [7, 8]] and rows.available == 2
    assert torch.equal(rows.document_starts, torch.tensor([[True, False], [False, False]]))


@pytest.mark.parametrize(
    "content, message",
    [("", "it is empty"), (" \n", "it is empty"), ("abc", "3 tokens, one row needs 4"), ("abcz", "outside")],
)
def test_text_without_a_row_is_refused(tmp_path, content, message):
    (tmp_path / "t.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        text_rows(Letters(), 20, str(tmp_path / "t.txt"), 1, 4, 0)


def test_unreadable_sources_are_refused(tmp_path, prefix, text):
    with pytest.raises(DataError, match="absent.txt"):
        text_rows(Letters(), 20, str(tmp_path / "absent.txt"), 1, 4, 0)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="UTF-8"):
        text_rows(Letters(), 20, str(tmp_path / "latin.txt"), 1, 4, 0)
    with pytest.raises(DataError, match="no such file"):
        indexed_rows(str(tmp_path / "absent"), 50, None, None, 1, 4, 0)
    with pytest.raises(DataError, match="leaves none of its 4 documents"):
        indexed_rows(prefix, 50, "1,0,0", None, 1, 4, 0)
    with pytest.raises(ConfigError, match="length=1"):
        text_rows(Letters(), 20, text, 1, 1, 0)
