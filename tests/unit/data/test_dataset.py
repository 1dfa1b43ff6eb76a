"""Rows: true next tokens, every token used, splits and blends as asked, caches that cannot mislead."""

import logging
import time
from collections import Counter

import numpy
import pytest
import torch

from megatron_fbt.data.dataset import blend_weights, build_datasets
from megatron_fbt.data.splits import document_ranges
from megatron_fbt.errors import ConfigError, DataError
from tests.unit.data.corpus import EOD, PlainTokenizer, data_config, numbered_documents, write_documents

TOKENIZER = PlainTokenizer()


def all_rows(rows):
    return [rows[i] for i in range(len(rows))]


@pytest.fixture
def corpus(tmp_path):
    return write_documents(tmp_path / "corpus", numbered_documents(20, 13))


@pytest.mark.parametrize("mmap", [True, False])
def test_rows_have_the_documented_form(tmp_path, corpus, mmap):
    data = build_datasets(data_config(tmp_path, [corpus], mmap=mmap), TOKENIZER, 50, 3)
    for rows in (data.train, data.valid):
        for row in all_rows(rows):
            assert set(row) == {"tokens", "labels", "loss_mask"}
            assert row["tokens"].dtype == row["labels"].dtype == torch.int64 and row["loss_mask"].dtype == torch.float32
            assert row["tokens"].shape == row["labels"].shape == row["loss_mask"].shape == (8,)
            assert torch.equal(row["tokens"][1:], row["labels"][:-1]) and row["loss_mask"].min() == 1
    assert len(data.train) >= 50 and len(data.valid) == (4 * 13 - 1) // 8


def test_the_label_after_an_end_token_can_be_left_out(tmp_path, corpus):
    data = build_datasets(data_config(tmp_path, [corpus], eod_mask_loss=True), TOKENIZER, 50, 0)
    rows = all_rows(data.train)
    assert all(torch.equal(row["loss_mask"] == 0, row["tokens"] == EOD) for row in rows)
    assert any((row["loss_mask"] == 0).any() for row in rows)


@pytest.mark.parametrize("extra", [-1, 0, 1, 2, 9])
@pytest.mark.parametrize("asked", ["one", "epoch", "epoch and one", "ten epochs"])
def test_one_document_gives_any_number_of_rows_with_true_next_tokens(tmp_path, extra, asked):
    length, tokens = 8, 8 + extra
    epoch = max(1, (tokens - 1) // length)
    samples = {"one": 1, "epoch": epoch, "epoch and one": epoch + 1, "ten epochs": 10 * epoch}[asked]
    document = list(range(1, tokens)) + [EOD]
    prefix = write_documents(tmp_path / "one", [document])
    data = build_datasets(data_config(tmp_path, [prefix], length, "1,0,0"), TOKENIZER, samples, 4)
    rows = all_rows(data.train)
    assert data.valid is None and len(rows) >= samples
    following = dict(zip(document, document[1:] + document[:1], strict=True))
    for row in rows:
        assert row["labels"].tolist() == [following[token] for token in row["tokens"].tolist()]


@pytest.mark.parametrize("samples", [1, 29, 30, 100, 291])
def test_every_token_of_an_epoch_is_used_once_but_for_the_tail(tmp_path, samples):
    documents = numbered_documents(20, 12)
    prefix = write_documents(tmp_path / "c", documents)
    rows = all_rows(build_datasets(data_config(tmp_path, [prefix], 8, "1,0,0"), TOKENIZER, samples, 0).train)
    epochs = -(-(samples * 8 + 1) // 240)
    used = Counter(token for row in rows for token in row["tokens"].tolist())
    everything = Counter({token: count * epochs for token, count in Counter(sum(documents, [])).items()})
    assert len(rows) == (240 * epochs - 1) // 8
    assert not used - everything and sum((everything - used).values()) == 240 * epochs - 8 * len(rows) <= 8


def test_rows_depend_on_seed_and_configuration_alone(tmp_path, corpus):
    def rows(folder, seed):
        config = data_config(tmp_path / folder, [corpus])
        config.run.seed = seed
        return torch.stack([row["tokens"] for row in all_rows(build_datasets(config, TOKENIZER, 60, 0).train)])

    first = rows("a", 1)
    numpy.random.seed(5)
    torch.manual_seed(5)
    assert torch.equal(first, rows("b", 1)) and torch.equal(first, rows("a", 1))
    assert not torch.equal(first, rows("a", 2)) and rows("a", 2**40 + 1).shape == first.shape


def test_training_and_validation_share_no_document(tmp_path):
    documents = [[i + 1] * 9 + [EOD] for i in range(100)]
    prefix = write_documents(tmp_path / "c", documents)
    data = build_datasets(data_config(tmp_path, [prefix], 8, "90,10,0"), TOKENIZER, 300, 300)
    seen = [{t for row in all_rows(rows) for t in row["tokens"].tolist()} - {EOD} for rows in (data.train, data.valid)]
    assert seen[0] == set(range(1, 91)) and seen[1] == set(range(91, 101))
    assert len(data.valid) == (10 * 10 - 1) // 8  # a row for each stretch of tokens, however many are asked for


@pytest.mark.parametrize("parts, documents", [((969, 30, 1), 10), ((99, 1, 0), 150), ((1, 1, 1), 7), ((100, 0, 0), 3)])
def test_split_ranges_are_megatrons(parts, documents):
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(",".join(map(str, parts))))
    for found, bounds in zip(document_ranges(parts, documents), matrix, strict=True):
        expected = tuple(int(round(bound * documents)) for bound in bounds) if bounds else None
        assert found == expected or (expected is None and found[0] == found[1])


@pytest.mark.parametrize(
    "split, documents, length",
    [("99,1,0", 10, 13), ("100,0,0", 10, 13), ("5,5,0", 10, 3), ("969,30,1", 10, 13), ("1,0,9", 10, 13)],
)
def test_a_split_without_a_row_is_switched_off_with_a_message(tmp_path, caplog, split, documents, length):
    prefix = write_documents(tmp_path / "c", numbered_documents(documents, length))
    begin = time.monotonic()
    with caplog.at_level(logging.INFO, logger="megatron_fbt"):
        data = build_datasets(data_config(tmp_path, [prefix], 16, split), TOKENIZER, 20, 5)
    assert data.valid is None and len(data.train) >= 20 and time.monotonic() - begin < 10
    assert f"validation is off: data.split {split}" in caplog.text


@pytest.mark.parametrize("split", ["0,1,0", "0,0,1", "1,999,0"])
def test_training_without_documents_is_an_error_that_names_split_and_data_set(tmp_path, corpus, split):
    with pytest.raises(DataError, match=f"corpus: data.split {split} gives training 0 of its 20 documents"):
        build_datasets(data_config(tmp_path, [corpus], 8, split), TOKENIZER, 20, 5)


@pytest.mark.parametrize("split", ["-1,1,0", "90,abc5,5", "0,0,0", "nan,1,1", "1,1,1,1", ""])
def test_impossible_splits_are_refused_with_their_text(tmp_path, corpus, split):
    with pytest.raises(ConfigError) as caught:
        build_datasets(data_config(tmp_path, [corpus], 8, split), TOKENIZER, 20, 5)
    assert repr(split) in str(caught.value)


def test_blanks_in_a_split_do_not_matter(tmp_path, corpus):
    assert len(build_datasets(data_config(tmp_path, [corpus], 8, "969, 30, 1"), TOKENIZER, 20, 0).train) >= 20


BLENDS = [[0.001, 0.999], [3, 7], [1e-12, 1], None, [1, 2, 3, 4, 5], [0.2] * 5, list(range(1, 61))]


@pytest.mark.parametrize("weights", BLENDS)
@pytest.mark.parametrize("samples", [1, 7, 500])
def test_blends_have_their_shares_and_every_row_can_be_read(tmp_path, weights, samples):
    count = len(weights or [1, 1, 1])
    prefixes = [
        write_documents(tmp_path / f"c{i}", [[i + 1] * (9 + i) + [EOD] for _ in range(10)]) for i in range(count)
    ]
    data = build_datasets(data_config(tmp_path, prefixes, 8, "8,2,0", weights), TOKENIZER, samples, 4)
    rows = all_rows(data.train)
    sources = Counter(max(row["tokens"].tolist()) for row in rows)
    shares = numpy.array(weights or [8 * (10 + i) for i in range(count)], dtype=float)
    found = numpy.array([sources[i + 1] for i in range(count)]) / samples
    assert len(rows) == samples and len(data.valid) == 4
    assert numpy.abs(found - shares / shares.sum()).max() <= 1 / samples
    assert len(all_rows(data.valid)) == 4


def test_a_source_may_be_named_twice(tmp_path, corpus):
    data = build_datasets(data_config(tmp_path, [corpus, corpus], 8, "8,2,0", [1, 3]), TOKENIZER, 100, 4)
    assert len(all_rows(data.train)) == 100


def test_a_source_without_validation_documents_is_left_out_of_validation_only(tmp_path, caplog):
    large = write_documents(tmp_path / "large", [[1] * 19 + [EOD] for _ in range(20)])
    small = write_documents(tmp_path / "small", [[2] * 19 + [EOD]])
    with caplog.at_level(logging.INFO, logger="megatron_fbt"):
        data = build_datasets(data_config(tmp_path, [large, small], 8, "8,2,0", [1, 1]), TOKENIZER, 50, 4)
    assert {t for row in all_rows(data.valid) for t in row["tokens"].tolist()} == {1, EOD}
    assert {t for row in all_rows(data.train) for t in row["tokens"].tolist()} == {1, 2, EOD}
    assert "small has no part in validation" in caplog.text


@pytest.mark.parametrize("weights", [[0, 1], [-1, 2], [float("nan"), 1], [float("inf"), 1], [1], [1, 2, 3]])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ConfigError, match=r"data\.weights"):
        blend_weights(["a", "b"], weights)


def test_nothing_to_read_and_nothing_to_train_are_refused(tmp_path, corpus):
    with pytest.raises(ConfigError, match="data.paths is empty"):
        build_datasets(data_config(tmp_path, []), TOKENIZER, 20, 5)
    with pytest.raises(ConfigError, match="0 training samples"):
        build_datasets(data_config(tmp_path, [corpus]), TOKENIZER, 0, 5)
    with pytest.raises(DataError, match=r"nowhere\.idx: no such file"):
        build_datasets(data_config(tmp_path, [tmp_path / "nowhere"]), TOKENIZER, 20, 5)


def test_ids_beyond_the_vocabulary_are_found_where_the_opening_check_does_not_look(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("megatron_fbt.data.indexed._PART", 4)
    data = build_datasets(data_config(tmp_path, [corpus], 8, "1,0,0"), PlainTokenizer(200), 20, 0)
    with pytest.raises(DataError, match="token id .* is outside the vocabulary of 200 .* data.tokenizer"):
        all_rows(data.train)


def test_a_new_corpus_of_the_same_name_does_not_meet_old_indices(tmp_path):
    config = data_config(tmp_path, [tmp_path / "c"], 8, "1,0,0")
    write_documents(tmp_path / "c", numbered_documents(20, 12))
    build_datasets(config, TOKENIZER, 40, 0)
    write_documents(tmp_path / "c", [[7] * 9 + [EOD] for _ in range(24)])  # as many tokens, other documents
    rows = all_rows(build_datasets(config, TOKENIZER, 40, 0).train)
    assert {t for row in rows for t in row["tokens"].tolist()} == {7, EOD}


@pytest.mark.parametrize("size", [0, 1, 100, -1, None])
@pytest.mark.parametrize("which", ["document_index", "sample_index", "shuffle_index"])
def test_a_damaged_cache_is_noticed_and_built_again(tmp_path, corpus, which, size, caplog):
    config = data_config(tmp_path, [corpus])
    expected = torch.stack([row["tokens"] for row in all_rows(build_datasets(config, TOKENIZER, 60, 0).train)])
    (cached,) = (tmp_path / "data_cache").rglob(f"*train-{which}.npy")
    content = cached.read_bytes()
    if size is None:
        cached.unlink()
    else:
        cached.write_bytes(content[:size])
    found = torch.stack([row["tokens"] for row in all_rows(build_datasets(config, TOKENIZER, 60, 0).train)])
    assert torch.equal(expected, found) and cached.read_bytes() == content
    assert size is None or "damaged" in caplog.text
    assert not list((tmp_path / "data_cache").rglob(".building-*"))
