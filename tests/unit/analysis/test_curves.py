"""Curves of written metrics files; interpolated values and crossings by hand."""

import json

import pytest

from megatron_fbt.analysis.curves import AXES, Curve, read_run, without_cut_rows
from megatron_fbt.errors import DataError


def curve(points):
    made = Curve()
    for x, y in points:
        made.add({"tokens": x, "token_equivalents": 2 * x}, y)
    return made


@pytest.mark.parametrize(
    "x, expected", [(100, 4.0), (150, 3.5), (200, 3.0), (350, 2.25), (400, 2.0), (99, None), (401, None)]
)
def test_values_lie_on_straight_lines_inside_the_range(x, expected):
    found = curve([(100, 4.0), (200, 3.0), (400, 2.0)])
    assert found.at("tokens", x) == expected == found.at("token_equivalents", 2 * x)


def test_a_curve_without_points_has_no_value():
    assert Curve().at("tokens", 1) is None and Curve().first_reach("tokens", 9.0) is None


@pytest.mark.parametrize(
    "loss, expected",
    [(3.5, 150), (3.0, 200), (2.25, 350), (2.0, 400), (1.99, None), (4.0, 100), (5.0, 100)],
)
def test_first_reach(loss, expected):
    found = curve([(100, 4.0), (200, 3.0), (400, 2.0)])
    assert found.first_reach("tokens", loss) == expected
    assert found.first_reach("token_equivalents", loss) == (expected and 2 * expected)


def test_the_first_of_several_crossings_counts():
    assert curve([(0, 4.0), (10, 2.0), (20, 3.0), (30, 1.0)]).first_reach("tokens", 2.5) == 7.5


def row(step, **fields):
    return {"step": step, "tokens": 10 * step, "token_equivalents": 20 * step, **fields}


def test_rows_of_steps_that_ran_again_are_left_out():
    rows = [row(1), row(2, old=True), row(3, old=True), row(2), {"step": 9}, row(3), row(3, newest=True)]
    assert without_cut_rows(rows, list(AXES)) == [row(1), row(2), row(3, newest=True)]


def write(folder, rows, tail=""):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows) + tail)
    return str(folder)


def test_run_folder(tmp_path):
    rows = [
        row(1, loss_pass_1=6.0),
        row(2, loss_pass_1=4.0, validation_loss_pass_1=5.0, validation_loss_pass_2=4.5, validation_loss_pass_3=4.75),
        row(3, loss_pass_1=None, validation_loss_pass_1=4.0, validation_loss_pass_2=None, validation_loss_soft=3.5),
    ]
    folder = write(tmp_path / "a", rows, tail='{"step": 4, "tok')
    (tmp_path / "a" / "config.yaml").write_text("model:\n  vocab_size: 7\n")
    run = read_run(folder)
    assert (run.name, run.tokens, run.token_equivalents) == ("a", 30, 60)
    assert run.notes == ["losses that are not finite are left out; steps with such: 1, the last is 3"]
    assert {name: found.y for name, found in run.curves.items()} == {
        "training": [6.0, 5.0],
        "last_pass": [4.75],
        "best_pass": [4.5, 4.0],
        "pass_1": [5.0, 4.0],
        "soft": [3.5],
    }
    assert run.curves["best_pass"].x == {"tokens": [20, 30], "token_equivalents": [40, 60]}
    assert run.setting("model.vocab_size") == 7 and run.setting("model.no.such") is None


def test_training_losses_are_a_running_mean(tmp_path):
    folder = write(tmp_path / "a", [row(step, loss_pass_1=float(step)) for step in range(1, 41)])
    assert read_run(folder).curves["training"].y[-1] == sum(range(21, 41)) / 20


def test_cut_rows_are_noted(tmp_path):
    rows = [row(step, loss_pass_1=1.0) for step in (1, 2, 3, 2, 3)]
    assert "2 rows" in read_run(write(tmp_path / "a", rows)).notes[0]


@pytest.mark.parametrize(
    "status, noted", [('{"state": "running"}', True), ('{"state": "finished"}', False), ("[", False), ("[]", False)]
)
def test_a_run_that_goes_on_is_noted(tmp_path, status, noted):
    folder = write(tmp_path / "a", [row(1, loss_pass_1=1.0)])
    (tmp_path / "a" / "status.json").write_text(status)
    assert [("is running" in note) for note in read_run(folder).notes] == [True] * noted


def test_damaged_configuration_is_none(tmp_path):
    folder = write(tmp_path / "a", [row(1, loss_pass_1=1.0)])
    (tmp_path / "a" / "config.yaml").write_text("model: [")
    assert read_run(folder).config == {}


@pytest.mark.parametrize("rows", [[], [row(1, loss_pass_1=None)], [{"step": 1, "loss_pass_1": 2.0}]])
def test_without_a_usable_row(tmp_path, rows):
    with pytest.raises(DataError, match="finite loss, tokens and token_equivalents"):
        read_run(write(tmp_path / "a", rows))


def test_numbers_that_no_run_writes_are_left_out(tmp_path):
    """Infinities, texts, negative counts and numbers beyond a float are no points of a curve, and noted."""
    odd = [
        row(2, loss_pass_1=float("inf")),
        row(3, loss_pass_1="1.0"),
        row(4, loss_pass_1=float("nan"), validation_loss_soft=float("-inf")),
        {**row(5, loss_pass_1=1.0), "tokens": -50},
        {**row(6, loss_pass_1=1.0), "tokens": 10**400},
        {**row(7, loss_pass_1=1.0), "token_equivalents": float("inf")},
    ]
    found = read_run(write(tmp_path / "a", [row(1, loss_pass_1=4.0), *odd, row(8, loss_pass_1=2.0)]))
    assert found.curves["training"].y == [4.0, 3.0] and set(found.curves) == {"training"}
    assert ["3 rows belong" in found.notes[0], "steps with such: 3, the last is 4" in found.notes[1]] == [True, True]


def test_no_run_there(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        read_run(str(tmp_path / "absent"))
    with pytest.raises(DataError, match="no metrics.jsonl"):
        read_run(str(tmp_path))
