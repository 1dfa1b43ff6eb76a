"""Progress: silent for short work, plain lines with rate and remaining time where there is no terminal."""

import io

import pytest

from megatron_fbt.data.progress import Progress, duration


def test_short_work_is_silent():
    stream = io.StringIO()
    with Progress(100, quiet_s=60, stream=stream) as progress:
        progress.update(50, 1, 2)
    assert stream.getvalue() == ""


def test_long_work_gives_plain_lines_at_intervals():
    stream = io.StringIO()
    with Progress(4_000_000, quiet_s=0, interval_s=60, stream=stream) as progress:
        for _ in range(3):
            progress.update(1_000_000, 1234, 5678)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith(" 25%  1,234 documents  5,678 tokens  1.0 of 4.0 MB") and "MB/s  ETA 0:00:0" in line


def test_a_pipe_of_unknown_size_does_not_break_it():
    stream = io.StringIO()
    with Progress(0, quiet_s=0, stream=stream) as progress:
        progress.update(0, 10, 20)
    assert "ETA unknown" in stream.getvalue()


@pytest.mark.parametrize("seconds, text", [(0.4, "0:00:00"), (61, "0:01:01"), (360_059.6, "100:01:00")])
def test_durations(seconds, text):
    assert duration(seconds) == text
