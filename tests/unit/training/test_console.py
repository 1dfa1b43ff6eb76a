"""Console line, durations, the time left, TensorBoard tags and events."""

import math

import pytest

from megatron_fbt.training.console import TimeLeft, console_line, format_count, format_duration, pass_values
from megatron_fbt.training.tensorboard_log import TensorBoardLog, tag_of

ROW = {
    "step": 7,
    "passes": 2,
    "loss": 9.5,
    "loss_pass_1": 4.25,
    "loss_pass_2": 5.25,
    "grad_norm": 1.5,
    "lr": 3e-4,
    "tokens": 4096,
    "tokens_per_second": 12345.0,
    "model_tflops": 0.0123,
    "skipped": 0,
}


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (3599.7, "1h00m"),
        (11220, "3h07m"),
        (187200, "2d04h"),
        (None, "?"),
        (math.inf, "?"),
        (math.nan, "?"),
        (-3, "0s"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (950, "950"),
        (12345, "12.3k"),
        (99999, "100k"),
        (4_000_000, "4.00M"),
        (999_960, "1.00M"),
        (1.25e9, "1.25B"),
        (3e12, "3.00T"),
        (math.nan, "?"),
    ],
)
def test_counts(value, text):
    assert format_count(value) == text


def test_line_has_everything_that_is_watched():
    line = console_line(ROW, train_steps=1000, eta_s=3725)
    for part in ("7/1000", "K 2", "9.5000", "4.2500 5.2500", "1.500", "3.000e-04", "12.3k tokens/s", "0.0123 TFLOP/s"):
        assert part in line
    assert "ETA 1h02m" in line and "skipped" not in line and "validation" not in line


def test_line_of_a_skipped_step_and_of_a_validated_one():
    bad = {**ROW, "loss": None, "loss_pass_2": None, "grad_norm": None, "skipped": 3}
    assert "loss non-finite" in console_line(bad, 10, None) and "skipped steps 3" in console_line(bad, 10, None)
    validated = {**ROW, "validation_loss_pass_1": 3.5, "validation_loss_pass_2": 3.25}
    line = console_line(validated, 10, None)
    assert line.endswith("validation per pass 3.5000 3.2500")
    assert console_line({**validated, "validation_loss_soft": 3.75}, 10, None) == f"{line} | in SOFT 3.7500"
    assert console_line({**validated, "validation_loss_soft": None}, 10, None) == f"{line} | in SOFT non-finite"


def test_pass_values_stop_at_the_last_pass():
    assert pass_values(ROW) == [4.25, 5.25]
    assert pass_values({"loss": 1.0}) == []


def test_time_left_counts_the_passes_to_come():
    left = TimeLeft()
    assert left.seconds(100.0) is None
    for _ in range(5):
        left.add_step(seconds=2.0, tokens=100, passes=1)
    assert left.seconds(100 * 10 * 1) == pytest.approx(20.0)
    assert left.seconds(100 * 10 * 3) == pytest.approx(60.0)
    left.add_step(seconds=6.0, tokens=100, passes=3)
    assert left.seconds(1000) == pytest.approx(20.0)


def test_time_left_follows_a_change_of_speed():
    left = TimeLeft(memory=0.5)
    left.add_step(1.0, 100, 1)
    for _ in range(20):
        left.add_step(4.0, 100, 1)
    assert left.seconds(100) == pytest.approx(4.0, rel=1e-3)


def test_tags_group_the_passes():
    assert tag_of("loss_pass_2") == "loss/pass_2"
    assert tag_of("validation_loss_pass_1") == "validation_loss/pass_1"
    assert tag_of("pass_share_3") == "pass_share/pass_3"
    assert tag_of("grad_norm") == "train/grad_norm"


def read_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_events_hold_finite_numbers_and_a_resume_hides_what_it_does_again(tmp_path):
    first = TensorBoardLog(tmp_path)
    for step in (1, 2, 3):
        first.log_row({"step": step, "loss": float(step), "loss_pass_1": 0.5, "grad_norm": math.nan, "lr": None})
    first.close()
    second = TensorBoardLog(tmp_path, first_step=3)
    second.log_row({"step": 3, "loss": 30.0})
    second.close()
    scalars = read_scalars(tmp_path)
    assert scalars["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert scalars["loss/pass_1"] == [(1, 0.5), (2, 0.5)]
    assert set(scalars) == {"train/loss", "loss/pass_1"}


def test_switched_off_it_writes_nothing(tmp_path):
    log = TensorBoardLog(tmp_path / "tensorboard", enabled=False)
    log.log_row(ROW)
    log.log_text("config", "a: 1")
    log.close()
    assert not (tmp_path / "tensorboard").exists()
