"""The plot of a comparison: every run, and a level line in its own colour where the baseline reaches its loss."""

import pytest

from megatron_fbt.analysis import run_comparison
from megatron_fbt.analysis.compare import compare_runs
from megatron_fbt.analysis.plots import COLORS, save_report
from megatron_fbt.errors import ConfigError
from tests.unit.analysis.test_compare import run
from tests.unit.analysis.test_curves import curve


def test_names_are_shown_as_they_are(tmp_path):
    """No formula between dollars, which matplotlib would fail at, and no run left out of the legend."""
    names = ["$x^$", "_$100", "b"]
    runs = [run(name, pass_1=curve([(100, 4.0), (400, 2.0 + n)])) for n, name in enumerate(names)]
    run_comparison.draw(runs, compare_runs(runs), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_many_runs_leave_the_panel_free(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(run_comparison, "save", lambda figure, path: figures.append(figure))
    for count in (3, 11):
        runs = [run(f"run{n}", pass_1=curve([(100, 4.0), (400, 3.0 - 0.1 * n)])) for n in range(count)]
        run_comparison.draw(runs, compare_runs(runs), tmp_path / "plot.png")
    few, many = figures
    assert few.axes[0].get_legend() is not None and not few.legends
    assert many.axes[0].get_legend() is None and len(many.legends[0].get_texts()) == 11


def test_a_folder_where_the_report_belongs_is_told(tmp_path):
    (tmp_path / "compare_runs.json").mkdir()
    with pytest.raises(ConfigError, match="compare_runs.json: cannot be written"):
        save_report({}, tmp_path / "compare_runs.json")


def test_every_run_is_drawn_and_lines_have_its_colour(monkeypatch, tmp_path):
    runs = [run("base", pass_1=curve([(100, 4.0), (800, 1.0)]))]
    runs += [run(f"worse{n}", pass_1=curve([(100, 9.0), (200, 8.0)])) for n in range(len(COLORS))]
    runs.append(run("fbt", pass_1=curve([(100, 4.0), (400, 2.0)])))
    figures = []
    monkeypatch.setattr(run_comparison, "save", lambda figure, path: figures.append(figure))
    run_comparison.draw(runs, compare_runs(runs), tmp_path / "plot.png")
    (figure,) = figures
    for panel, work in zip(figure.axes, ("tokens", "token-equivalents"), strict=True):
        lines = {line.get_label(): line for line in panel.get_lines()}
        for one in runs:
            assert f"{one.name}: validation loss, pass 1" in lines
        (need,) = [label for label in lines if label.startswith("for ")]
        assert need.startswith("for 2.000, base needs 1.4") and need.endswith(f"x the {work}")
        assert lines[need].get_color() == lines["fbt: validation loss, pass 1"].get_color()
        legend = panel.get_legend() or figure.legends[0]
        assert need in [text.get_text() for text in legend.get_texts()]
