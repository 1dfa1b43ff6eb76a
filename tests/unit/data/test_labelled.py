"""Rows with labels of their own: exact position by position, refused by file and line, no row needs the past."""

import json
import logging

import numpy
import pytest
import torch

from megatron_fbt.data.batch import BatchReader, load_micro_batches
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.token_ids import NO_TOKEN, run_tokenizer
from megatron_fbt.errors import ConfigError, DataError
from tests.unit.data.corpus import data_config

ROW = {"input_ids": [4, 1, 0], "labels": [-100, 2, 3], "feedback": [0, 0, 1]}


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def build(folder, rows, length=3, samples=20, valid=0, split="1,0,0", vocab_size=5, seed=3, **data):
    path = write(folder / "rows.jsonl", rows)
    config = data_config(folder, [path], length, split, format="labelled", **data)
    config.model.vocab_size, config.run.seed = vocab_size, seed
    return build_datasets(config, run_tokenizer(config), samples, valid)


@pytest.mark.parametrize("mmap", [True, False])
def test_a_row_is_what_the_line_says(tmp_path, mmap):
    row = build(tmp_path, [ROW], mmap=mmap).train[0]
    expected = {
        "tokens": torch.tensor([4, 1, 0]),
        "labels": torch.tensor([0, 2, 3]),
        "loss_mask": torch.tensor([0.0, 1.0, 1.0]),
        "document_starts": torch.tensor([True, False, False]),
        "feedback_region": torch.tensor([False, False, True]),
    }
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(row[name], value) and row[name].dtype == value.dtype, name


def test_without_marks_everything_may_be_fed_back(tmp_path):
    row = build(tmp_path, [{"input_ids": [4, 1, 0], "labels": [0, 0, 1]}]).train[0]
    assert row["feedback_region"].tolist() == [True] * 3 and row["loss_mask"].tolist() == [1.0] * 3


@pytest.mark.parametrize("stages", [(True, True), (True, False), (False, False), (False, True)])
def test_a_micro_batch_has_the_rows_fields(tmp_path, stages):
    rows = build(tmp_path, [ROW, {**ROW, "input_ids": [1, 2, 3]}]).train
    reader = BatchReader(None, 0, *stages, torch.device("cpu"))
    (batch,) = load_micro_batches(rows, [[0, 1]], NO_TOKEN, reader)
    expected = {name: torch.stack([rows[i][name] for i in range(2)]) for name in rows[0]}
    for name in ("document_starts", "feedback_region"):
        assert torch.equal(getattr(batch, name), expected[name])
    assert torch.equal(batch.tokens, expected["tokens"]) if stages[0] else batch.tokens is None
    for name in ("labels", "loss_mask"):
        assert torch.equal(getattr(batch, name), expected[name]) if stages[1] else getattr(batch, name) is None


def numbered(count):
    return [{"input_ids": [n], "labels": [n]} for n in range(count)]


def order(rows, begin, end):
    return [int(rows[i]["tokens"]) for i in range(begin, end)]


def test_each_row_comes_once_in_an_epoch_in_an_order_of_its_own(tmp_path):
    rows = build(tmp_path, numbered(30), length=1, samples=90, vocab_size=30).train
    epochs = [order(rows, 30 * epoch, 30 * epoch + 30) for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 3
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(30))}) == 4


def test_the_row_of_a_number_depends_on_seed_and_number_alone(tmp_path):
    first = order(build(tmp_path, numbered(30), length=1, samples=50, vocab_size=30).train, 0, 50)
    again = build(tmp_path, numbered(30), length=1, samples=500, vocab_size=30).train
    assert [int(again[i]["tokens"]) for i in reversed(range(50))][::-1] == first
    assert order(build(tmp_path, numbered(30), length=1, samples=50, vocab_size=30, seed=4).train, 0, 50) != first


def test_splits_share_no_row(tmp_path, caplog):
    data = build(tmp_path, numbered(20), length=1, samples=32, valid=3, split="8,2,0", vocab_size=20)
    assert set(order(data.train, 0, 32)) == set(range(16))
    assert len(data.valid) == 3 and set(order(data.valid, 0, 3)) < set(range(16, 20))
    assert len(build(tmp_path, numbered(20), 1, 32, 50, "8,2,0", vocab_size=20).valid) == 4
    with caplog.at_level(logging.WARNING, logger="megatron_fbt"):
        assert build(tmp_path, numbered(20), 1, 32, 50, vocab_size=20).valid is None
    assert "validation is off: data.split 1,0,0 leaves no row for it" in caplog.text
    with pytest.raises(DataError, match=r"data\.split 0,1,0 leaves none of 20 rows"):
        build(tmp_path, numbered(20), 1, split="0,1,0", vocab_size=20)


BAD = {
    "not_integers": [
        {"input_ids": [1, 2.0, 3]},
        {"labels": [True, 1, 1]},
        {"input_ids": "abc"},
        {"feedback": [1, None]},
    ],
    "wrong_length": [{"input_ids": [1, 2]}, {"labels": [1] * 4}, {"feedback": []}],
    "bad_id": [{"input_ids": [1, 5, 1]}, {"input_ids": [-1, 1, 1]}, {"input_ids": [1, 1, 10**30]}],
    "bad_label": [{"labels": [5, 1, 1]}, {"labels": [-1, 1, 1]}],
    "bad_feedback": [{"feedback": [0, 1, 2]}],
}


@pytest.mark.parametrize("kind, change", [(kind, change) for kind, changes in BAD.items() for change in changes])
def test_a_line_that_is_no_row_is_named(tmp_path, kind, change):
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: .*{next(iter(change))}.*\({kind}\)"):
        build(tmp_path, [ROW, {**ROW, **change}])
    assert not list(tmp_path.glob("data_cache/labelled-*"))


@pytest.mark.parametrize("key", ["input_ids", "labels"])
def test_missing_keys_and_broken_lines_are_named(tmp_path, key):
    with pytest.raises(DataError, match=rf"line 1: no key '{key}'.*\(key_missing\)"):
        build(tmp_path, [{name: value for name, value in ROW.items() if name != key}])
    with pytest.raises(DataError, match=r"line 1: .*\(invalid_json\)"):
        build(tmp_path, ["{"])


def test_rows_without_any_label_are_refused(tmp_path):
    with pytest.raises(DataError, match="2 rows and not one label that counts"):
        build(tmp_path, [{**ROW, "labels": [-100] * 3}] * 2)


def test_the_cache_belongs_to_content_length_and_vocabulary(tmp_path):
    for rows, vocab_size in (([ROW], 5), ([ROW], 5), ([ROW], 6), ([ROW, ROW], 5)):
        build(tmp_path, rows, vocab_size=vocab_size)
    assert len(list(tmp_path.glob("data_cache/labelled-*"))) == 3
    for damaged in tmp_path.glob("data_cache/labelled-*/rows.bin"):
        damaged.write_bytes(damaged.read_bytes()[:-4])
    assert numpy.array_equal(build(tmp_path, [ROW]).train[0]["tokens"], [4, 1, 0])


def test_token_ids_need_the_size_of_the_vocabulary_and_no_tokenizer(tmp_path):
    config = data_config(tmp_path, ["rows.jsonl"], format="labelled")
    with pytest.raises(ConfigError, match=r"model\.vocab_size = null"):
        run_tokenizer(config)
    config.model.vocab_size = 7
    tokenizer = run_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.detokenize([3, 1])) == (7, -1, "3 1")
    with pytest.raises(DataError, match="there is no tokenizer for text"):
        tokenizer.tokenize("a")
