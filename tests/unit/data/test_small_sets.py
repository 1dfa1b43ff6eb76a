"""Splits and sets that are too small, wherever they can occur: data sets, mixtures, conversations, labelled rows."""

import json

import pytest
import torch

from megatron_fbt.config.sources import SourceConfig
from megatron_fbt.data.batch import BatchReader, load_micro_batches
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.sampler import micro_batch_sample_ids
from megatron_fbt.data.tokenizer import HuggingFaceTokenizer
from megatron_fbt.errors import ConfigError, DataError
from tests.unit.data.chats import chat, write_chats, write_letter_tokenizer
from tests.unit.data.corpus import data_config, numbered_documents, write_documents

KINDS = ("paths", "sources", "conversations", "labelled")
LENGTH = 12


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return HuggingFaceTokenizer(write_letter_tokenizer(tmp_path_factory.mktemp("letters")))


@pytest.fixture
def build(tmp_path, letters):
    """Builds ten documents (or conversations or rows), each of about a row."""

    def build_kind(kind, split, train=8, valid=4):
        fields = {} if kind in ("paths", "sources") else {"format": kind, "reset_attention_mask": True}
        if kind == "conversations":
            path = write_chats(tmp_path / "chats.jsonl", [chat(f"user: {n}", "assistant: abcd") for n in range(10)])
        elif kind == "labelled":
            path = tmp_path / "rows.jsonl"
            row = {"input_ids": [1] * LENGTH, "labels": [2] * LENGTH}
            path.write_text("".join(json.dumps({**row, "input_ids": [1 + n] * LENGTH}) + "\n" for n in range(10)))
        else:
            path = write_documents(tmp_path / "c", numbered_documents(10, LENGTH + 1, vocab_size=letters.vocab_size))
        config = data_config(tmp_path, [path], LENGTH, split, **fields)
        config.model.vocab_size = letters.vocab_size
        if kind == "sources":
            config.data.paths, config.data.sources = [], [SourceConfig("c", [str(path)], 1)]
        return build_datasets(config, letters, train, valid)

    return build_kind


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_splits_are_refused_with_their_text(build, kind):
    for split in ("-1,1,0", "90,abc5,5", "0,0,0", "nan,1,1", "1,1,1,1", ""):
        with pytest.raises(ConfigError, match="not a split") as caught:
            build(kind, split)
        assert repr(split) in str(caught.value)
    assert len(build(kind, "969, 30, 1").train) >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_without_a_row_switches_validation_off_and_one_without_training_is_an_error(build, kind, caplog):
    for number, split in enumerate(("99,1,0", "100,0,0"), start=1):
        data = build(kind, split)
        assert data.valid is None and len(data.train) >= 8 and caplog.text.count("validation is off") == number
    with pytest.raises((ConfigError, DataError), match="train"):
        build(kind, "0,1,0")


@pytest.mark.parametrize("kind", KINDS)
def test_sets_smaller_than_a_batch_wrap_around(build, letters, kind):
    with pytest.raises(ConfigError, match="0 training samples"):
        build(kind, "9,1,0", train=0)
    for ranks in (1, 2, 3):
        batch = 2 * ranks
        for train in (1, batch - 1, batch, batch + 1):
            data = build(kind, "9,1,0", train=train, valid=batch)
            assert len(data.train) >= train and len(data.valid) == 1
            for rows in (data.train, data.valid):
                for rank in range(ranks):
                    ids = micro_batch_sample_ids(0, batch, 2, rank, ranks)
                    reader = BatchReader(None, 0, True, True, torch.device("cpu"))
                    (read,) = load_micro_batches(rows, ids, letters.eod, reader)
                    expected = [rows[n % len(rows)]["tokens"] for n in ids[0]]
                    assert torch.equal(read.tokens, torch.stack(expected))
