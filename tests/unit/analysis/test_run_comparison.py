"""The plot of a comparison: every run, and a level line in its own colour where the baseline reaches its loss."""

from megatron_fbt.analysis import run_comparison
from megatron_fbt.analysis.compare import compare_runs
from megatron_fbt.analysis.plots import COLORS
from tests.unit.analysis.test_compare import run
from tests.unit.analysis.test_curves import curve


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
        assert need in [text.get_text() for text in panel.get_legend().get_texts()]
