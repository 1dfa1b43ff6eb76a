"""Progress of pieces of work: silent at first, then lines with the time left."""

import io

import pytest

from megatron_fbt.analysis import progress
from megatron_fbt.analysis.progress import PieceProgress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_begin_after_the_quiet_seconds(clock):
    stream = io.StringIO()
    with PieceProgress(100, "passes", quiet_s=5, interval_s=10, stream=stream) as shown:
        for _ in range(100):
            clock[0] += 1
            shown.advance()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "  5%  5 of 100 passes  ETA 0:01:35"
    assert lines[1].startswith(" 15%  15 of 100") and len(lines) == 10


def test_short_work_says_nothing(clock):
    stream = io.StringIO()
    with PieceProgress(4, "passes", stream=stream) as shown:
        for _ in range(4):
            clock[0] += 1
            shown.advance()
    assert stream.getvalue() == ""
