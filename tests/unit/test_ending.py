"""What ends a command is told in one piece, by one rank of a machine."""

import time
from types import SimpleNamespace

import pytest

from megatron_fbt import ending
from megatron_fbt.ending import end_rank, tell
from megatron_fbt.errors import DataError

ERROR = DataError("data.paths = []: no data set; name one")


class Pieces(list):
    """Takes the place of standard error; what each write was given."""

    write, flush = list.append, lambda self: None


@pytest.fixture
def pieces(monkeypatch):
    """What is written to standard error, and the seconds slept."""
    found, slept = Pieces(), []
    monkeypatch.setattr(ending, "sys", SimpleNamespace(stderr=found))
    monkeypatch.setattr(time, "sleep", slept.append)
    return found, slept


def test_an_error_is_one_write_and_its_code(pieces):
    assert tell(ERROR) == 3 and pieces == (["error: data.paths = []: no data set; name one\n"], [])


@pytest.mark.parametrize("rank, launcher, speaks", [("0", "yes", None), ("1", "yes", True), (None, None, None)])
def test_a_rank_that_speaks_does_so_at_once(pieces, rank, launcher, speaks):
    assert end_rank(error_of(DataError, speaks), environment_of(rank, launcher)) == 3
    assert pieces == (["error: x\n"], [])
    assert end_rank(error_of(ValueError, speaks), environment_of(rank, launcher)) == 1
    assert len(pieces[0]) == 2 and pieces[0][1].endswith("ValueError: x\n")


def test_a_rank_that_does_not_lets_torchruns_first_one_speak(pieces):
    assert end_rank(ERROR, environment_of("1", "yes")) == 3 and pieces == ([], [ending.SPEAKER_S])


@pytest.mark.parametrize("rank, launcher, speaks", [("1", None, None), ("0", "yes", False)])
def test_nobody_waits_without_need(pieces, rank, launcher, speaks):
    assert end_rank(error_of(DataError, speaks), environment_of(rank, launcher)) == 3 and pieces == ([], [])


def error_of(kind, speaks):
    error = kind("x")
    if speaks is not None:
        error.speaks = speaks
    return error


def environment_of(rank, launcher):
    named = {"LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": launcher}
    return {name: value for name, value in named.items() if value is not None}
