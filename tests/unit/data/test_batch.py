"""Micro-batches of one process; the broadcast is tested in tests/distributed/test_batches.py."""

import pytest
import torch

from megatron_fbt.data.batch import BatchReader, document_starts, load_micro_batches
from megatron_fbt.errors import DataError
from tests.unit.data.corpus import EOD


class Sequence:
    """Rows [i*10, i*10 + 1, ...] with an end token in the middle; some mask values are not 0 or 1."""

    sequence_length = 5

    def __init__(self, length):
        self._length = length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        assert 0 <= index < self._length
        text = torch.arange(6) + 10 * index + 1
        text[2] = EOD
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.tensor([1, 0, 0.3, 1, 1])}


def reader(first, last):
    return BatchReader(None, 0, first, last, torch.device("cpu"))


def test_a_single_stage_gets_everything():
    batches = load_micro_batches(Sequence(9), [[0, 1], [5, 6]], EOD, reader(True, True))
    assert [batch.sample_ids.tolist() for batch in batches] == [[0, 1], [5, 6]]
    batch = batches[1]
    assert batch.tokens.tolist() == [[51, 52, 0, 54, 55], [61, 62, 0, 64, 65]]
    assert batch.labels.tolist() == [[52, 0, 54, 55, 56], [62, 0, 64, 65, 66]]
    assert torch.equal(batch.loss_mask, torch.tensor([[1, 0, 0.3, 1, 1]] * 2))
    assert batch.document_starts.tolist() == [[True, False, False, True, False]] * 2
    assert batch.tokens.dtype == batch.labels.dtype == batch.sample_ids.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.float32 and batch.document_starts.dtype == torch.bool


@pytest.mark.parametrize("first, last", [(True, False), (False, False), (False, True)])
def test_other_stages_get_what_they_need(first, last):
    (whole,) = load_micro_batches(Sequence(9), [[3, 4]], EOD, reader(True, True))
    (batch,) = load_micro_batches(Sequence(9), [[3, 4]], EOD, reader(first, last))
    for name, wanted in (("tokens", first), ("labels", last), ("loss_mask", last)):
        value = getattr(batch, name)
        assert torch.equal(value, getattr(whole, name)) if wanted else value is None
    assert torch.equal(batch.document_starts, whole.document_starts)
    assert torch.equal(batch.sample_ids, whole.sample_ids)


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_numbers_beyond_the_end_start_again_and_keep_their_names(length):
    numbers = [0, 3, 4, 5, 2**32 + 1, 3 * 10**12]
    (batch,) = load_micro_batches(Sequence(length), [numbers], EOD, reader(True, True))
    assert batch.sample_ids.tolist() == numbers
    assert batch.tokens[:, 0].tolist() == [10 * (number % length) + 1 for number in numbers]


def test_an_empty_data_set_is_an_error():
    with pytest.raises(DataError, match="no sample"):
        load_micro_batches(Sequence(0), [[0]], EOD, reader(True, True))


def test_document_starts_follow_end_tokens_and_begin_rows():
    tokens = torch.tensor([[EOD, EOD, 5, EOD], [1, 2, 3, 4]])
    assert document_starts(tokens, EOD).tolist() == [[True, True, True, False], [True, False, False, False]]


class Marked(Sequence):
    """The same rows with marks of their own."""

    marked = True

    def __getitem__(self, index):
        marks = {"document_starts": torch.tensor([1, 0, 0, 0, 1]) > 0, "feedback_region": torch.arange(5) > index}
        return {**super().__getitem__(index), **marks}


@pytest.mark.parametrize("rows", [Sequence, Marked])
@pytest.mark.parametrize("first, last", [(True, True), (False, False), (False, True)])
def test_every_stage_has_what_places_the_passes_on_the_host_too(rows, first, last):
    names = ("document_starts", "sample_ids", "feedback_region")
    on_cpu = load_micro_batches(rows(9), [[0, 1], [2, 3]], EOD, reader(first, last))
    on_device = load_micro_batches(
        rows(9), [[0, 1], [2, 3]], EOD, BatchReader(None, 0, first, last, torch.device("meta"))
    )
    for batch, expected in zip(on_device, on_cpu, strict=True):
        assert batch.document_starts.device.type == "meta" and expected.host is expected
        for name in names:
            found, wanted = getattr(batch.host, name), getattr(expected, name)
            assert torch.equal(found, wanted) if wanted is not None else found is None
        assert (batch.host.feedback_region is None) == (rows is Sequence)
        assert batch.host.tokens is batch.host.labels is batch.host.loss_mask is None
