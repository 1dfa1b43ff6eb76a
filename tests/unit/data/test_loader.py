"""Rows read ahead by processes: the same as those read at once, whatever comes; and what becomes of the processes."""

import multiprocessing
import os
import signal
import time
from multiprocessing import forkserver

import pytest
import torch

from megatron_fbt.data.batch import BatchReader, load_micro_batches
from megatron_fbt.data.loader import rows_ahead
from megatron_fbt.errors import DataError
from tests.unit.data.corpus import EOD

READER = BatchReader(None, 0, True, True, torch.device("cpu"))


class Counting:
    """Rows [10 i + 1, ...] with an end token; row 90 cannot be read, row 91 breaks."""

    sequence_length = 5

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 90:
            raise DataError("row 90 is bad:\nits second line")
        if index == 91:
            raise KeyError("row 91")
        text = torch.arange(6) + 10 * index + 1
        text[2] = EOD
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.tensor([1, 0, 0.3, 1, 1])}


class Plan:
    """Steps of one to four micro-batches of two rows."""

    def __init__(self, first=0, sizes=(1, 2, 4, 3)):
        self.first, self.sizes = first, sizes

    def step(self, number):
        size = self.sizes[number % len(self.sizes)]
        begin = self.first + 2 * sum(self.sizes[n % len(self.sizes)] for n in range(number))
        return [[begin + 2 * m, begin + 2 * m + 1] for m in range(size)]

    def coming(self, number=0, end=12):
        return (self.step(n) for n in range(number, end))


@pytest.fixture(scope="module", autouse=True)
def server():
    """The fork server of the distributed tests."""
    multiprocessing.set_forkserver_preload(["tests.distributed.preload"])
    forkserver.ensure_running()


@pytest.fixture
def ahead():
    """A loader whose steps follow from `place`; ended with the test."""
    made = []

    def make(place, workers=2):
        made.append(rows_ahead(workers, Counting(), EOD, READER, lambda: place["plan"].coming(place["step"])))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def same(found, expected):
    for batch, other in zip(found, expected, strict=True):
        for name in ("tokens", "labels", "loss_mask", "document_starts", "sample_ids"):
            assert torch.equal(getattr(batch, name), getattr(other, name)), name


def read(loader, ids):
    return load_micro_batches(Counting(), ids, EOD, READER, loader)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_rows_in_the_same_order_after_a_change_of_place_and_to_the_last_step(ahead, workers):
    place = {"plan": Plan(), "step": 0}
    loader = ahead(place, workers)
    before = torch.get_rng_state()
    for number in [0, 1, 2, 3, 7, 8, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11, 0]:
        place["step"] = number
        ids = place["plan"].step(number)
        same(read(loader, ids), read(None, ids))
    place.update(plan=Plan(2**32 + 200), step=0)  # what was left out moves all samples
    ids = place["plan"].step(0)
    (batch,) = read(loader, ids)
    assert batch.sample_ids.tolist() == ids[0] and batch.tokens[0, 0] == 10 * (ids[0][0] % 100) + 1
    assert torch.equal(torch.get_rng_state(), before), "dropout draws from this generator"
    assert len(multiprocessing.active_children()) == workers
    loader.close()
    assert not multiprocessing.active_children()


def test_an_error_in_a_worker_is_the_error_and_the_next_rows_can_be_read(ahead):
    place = {"plan": Plan(86, (1,)), "step": 0}
    loader = ahead(place, 1)
    for number in range(2):
        place["step"] = number
        read(loader, place["plan"].step(number))
    place["step"] = 2
    with pytest.raises(DataError) as caught:
        read(loader, [[90, 91]])
    assert str(caught.value) == "row 90 is bad:\nits second line"
    place["plan"] = Plan(87, (1,))
    with pytest.raises(KeyError, match="row 91"):
        read(loader, [[91, 92]])
    place["step"] = 3
    (batch,) = read(loader, [[93, 94]])
    assert batch.tokens[:, 0].tolist() == [931, 941]


def test_a_killed_worker_is_an_error_with_a_remedy_and_no_wait_without_end(ahead):
    place = {"plan": Plan(), "step": 0}
    loader = ahead(place, 2)
    read(loader, place["plan"].step(0))
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(DataError, match="a process that reads data ahead died .*data.num_workers below 2"):
        for number in range(1, 9):
            place["step"] = number
            read(loader, place["plan"].step(number))
    assert time.monotonic() - began < 20 and not multiprocessing.active_children()
