"""Comparisons of runs: equal work, crossings and warnings, by hand."""

import pytest

from megatron_fbt.analysis.compare import compare_runs, describe, read_runs
from megatron_fbt.analysis.curves import Run
from megatron_fbt.errors import ConfigError
from tests.unit.analysis.test_curves import curve, row, write

CONFIG = {"model": {"vocab_size": 50, "num_layers": 2}, "data": {"format": "indexed", "paths": ["d"]}}


def run(name, config=None, **curves):
    return Run(name, name, curves, CONFIG if config is None else config, 400, 800, [])


def standard():
    """One pass throughout: token-equivalents are tokens (the helper's double them, so halve)."""
    made = curve([(100, 4.0), (200, 3.0), (400, 2.0), (800, 1.5)])
    made.x["token_equivalents"] = list(made.x["tokens"])
    return run("standard", last_pass=made, best_pass=made, pass_1=made)


def comparison(report, metric, axis):
    (found,) = [c for c in report["comparisons"] if (c["metric"], c["axis"]) == (metric, axis)]
    return found


def test_equal_tokens_and_equal_compute_by_hand():
    fbt = run("fbt", last_pass=curve([(100, 4.5), (300, 2.0), (500, 1.75)]))
    report = compare_runs([standard(), fbt])
    tokens = comparison(report, "last_pass", "tokens")
    assert tokens["common_range"] == [100, 500]
    assert [point["at"] for point in tokens["points"]] == [200, 300, 400, 500]
    assert [point["loss"] for point in tokens["points"]] == pytest.approx([3.25, 2.0, 1.875, 1.75])
    assert [point["baseline_loss"] for point in tokens["points"]] == pytest.approx([3.0, 2.5, 2.0, 1.875])
    assert tokens["points"][-1]["difference"] == pytest.approx(-0.125)
    assert (tokens["status"], tokens["baseline_needs"], tokens["ratio"]) == ("reached", 600, 1.2)
    equal_compute = comparison(report, "last_pass", "token_equivalents")
    assert equal_compute["common_range"] == [200, 800]
    assert equal_compute["points"][-1]["loss"] == pytest.approx(1.875)
    assert equal_compute["points"][-1]["baseline_loss"] == 1.5
    assert (equal_compute["baseline_needs"], equal_compute["ratio"]) == (600, 0.6)
    text = describe(report)
    assert "1.20x the tokens" in text and "0.60x the token-equivalents" in text and "1.5 to 2 times" in text


def test_what_the_baseline_does_not_reach_is_not_extrapolated():
    report = compare_runs([standard(), run("fbt", last_pass=curve([(100, 4.0), (500, 1.4)]))])
    found = comparison(report, "last_pass", "tokens")
    assert (found["status"], found["baseline_needs"], found["ratio"]) == ("not reached", None, None)
    assert "not reached by standard within its 800 tokens" in describe(report)


def test_a_worse_run_and_one_that_the_baseline_begins_below():
    report = compare_runs([standard(), run("bad", last_pass=curve([(50, 6.0), (90, 5.0)]))])
    found = comparison(report, "last_pass", "tokens")
    assert (found["status"], found["ratio"], found["common_range"]) == ("from the start", None, None)
    text = describe(report)
    assert "ranges do not overlap" in text and "there at its first measurement, with 100 tokens" in text


def test_every_run_is_compared_with_the_first():
    report = compare_runs([standard(), run("b", pass_1=curve([(100, 4.0)])), run("c", pass_1=curve([(100, 3.0)]))])
    assert [(c["run"], c["axis"]) for c in report["comparisons"]] == [
        (name, axis) for name in "bc" for axis in ("tokens", "token_equivalents")
    ]


def test_training_losses_stand_in_only_where_there_is_no_validation():
    training = curve([(100, 4.0), (200, 3.0)])
    report = compare_runs([run("a", training=training), run("b", training=training, pass_1=training)])
    assert {c["metric"] for c in report["comparisons"]} == {"training"}
    assert any("training loss of pass 1 is compared" in warning for warning in report["warnings"])
    both = compare_runs([run("a", training=training, pass_1=training), run("b", training=training, pass_1=training)])
    assert {c["metric"] for c in both["comparisons"]} == {"pass_1"} and both["warnings"] == []


def test_no_common_loss_is_said():
    points = curve([(100, 4.0)])
    report = compare_runs([run("a", training=points), run("b", pass_1=points)])
    assert report["comparisons"] == [] and any("no loss that both" in warning for warning in report["warnings"])


@pytest.mark.parametrize("data_format, counterpart", [("indexed", None), ("conversations", "pass_1")])
def test_soft_is_compared_with_pass_1_only_where_it_scores_the_same_positions(data_format, counterpart):
    config = {**CONFIG, "data": {**CONFIG["data"], "format": data_format}}
    points = curve([(100, 4.0), (200, 3.0)])
    report = compare_runs([run("a", config, pass_1=points), run("b", config, pass_1=points, soft=points)])
    found = {c["metric"]: c["baseline_metric"] for c in report["comparisons"]}
    assert found.get("soft") == counterpart
    assert any("second half of each row" in warning for warning in report["warnings"]) == (counterpart is None)
    own = compare_runs([run("a", config, soft=points), run("b", config, soft=points)])
    assert {(c["metric"], c["baseline_metric"]) for c in own["comparisons"]} == {("soft", "soft")}


@pytest.mark.parametrize(
    "section, field, value, word",
    [
        ("model", "vocab_size", 51, "not comparable"),
        ("data", "paths", ["e"], "data sets differ"),
        ("model", "num_layers", 4, "not equal compute"),
        ("training", "train_steps", 9, "differ (training.train_steps): the loss falls most while the learning rate"),
        ("optimizer", "lr", 1e-3, "differ (optimizer.lr)"),
    ],
)
def test_settings_that_spoil_a_comparison_are_warned_of(section, field, value, word):
    other = {**CONFIG, section: {**CONFIG.get(section, {}), field: value}}
    points = curve([(100, 4.0)])
    (warning,) = compare_runs([run("a", pass_1=points), run("b", other, pass_1=points)])["warnings"]
    assert word in warning and warning.startswith("a and b: ")


def test_a_run_without_a_configuration_is_warned_of_once():
    points = curve([(100, 4.0)])
    report = compare_runs([run("a", {}, pass_1=points), run("b", pass_1=points), run("c", pass_1=points)])
    assert report["warnings"] == [
        "a: no readable config.yaml, so it is not known whether its losses are comparable",
    ]


def test_the_baseline_comes_first_and_equal_names_become_paths(tmp_path):
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
    rows = [row(1, loss_pass_1=1.0)]
    folders = [write(tmp_path / "x" / "run", rows), write(tmp_path / "y" / "run", rows), write(tmp_path / "z", rows)]
    assert [one.name for one in read_runs(folders)] == folders
    assert [one.name for one in read_runs(folders[1:], baseline=folders[2])] == ["z", "run"]
    assert [one.path for one in read_runs(folders, baseline=folders[1])] == [folders[1], folders[0], folders[2]]
    with pytest.raises(ConfigError, match="at least two"):
        read_runs(folders[:1])
    with pytest.raises(ConfigError, match="named twice"):
        read_runs([folders[0], folders[0] + "/"])
