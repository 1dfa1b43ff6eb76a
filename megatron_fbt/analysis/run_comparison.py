"""What tools/compare_runs.py does: runs, report, plot."""

import itertools
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from megatron_fbt.analysis.compare import compare_runs, read_runs
from megatron_fbt.analysis.curves import AXES, METRICS, Run
from megatron_fbt.analysis.plots import (
    COLORS,
    new_figure,
    output_folder,
    plain_text,
    require_matplotlib,
    save,
    save_report,
)
from megatron_fbt.training.console import format_count
from megatron_fbt.training.metrics import json_ready

STYLES = {"last_pass": "-", "pass_1": "--", "soft": ":", "training": "-"}
"""Losses that are drawn, with their line styles."""
MOST_IN_PANEL = 8
"""Entries of a legend that still leave room for the curves."""
EARLY = 0.3
"""Share of a run whose losses may lie above the plot."""


def compare(folders: Sequence[str], baseline: Optional[str] = None, output: Optional[str] = None) -> Dict[str, Any]:
    """Compare runs; with an output folder also write compare_runs.json and compare_runs.png there.

    Raises:
        ConfigError: Fewer than two runs, or the plot cannot be drawn.
        DataError: A folder has no usable metrics.
    """
    if output is not None:
        require_matplotlib()
    runs = read_runs(folders, baseline)
    report = json_ready(compare_runs(runs))
    if output is not None:
        folder = output_folder(output)
        save_report(report, folder / "compare_runs.json")
        draw(runs, report, folder / "compare_runs.png")
    return report


def draw(runs: Sequence[Run], report: Dict[str, Any], path: Path) -> None:
    """Losses over tokens and over token-equivalents, side by side."""
    metrics = _drawn(report)
    colors = dict(zip([run.name for run in runs], itertools.cycle(COLORS)))
    figure, axes = new_figure(2, f"{', '.join(run.name for run in runs[1:])} against {runs[0].name}")
    for axis, panel in zip(AXES, axes, strict=True):
        for run in runs:
            for metric in metrics:
                _draw_curve(panel, run, metric, axis, colors[run.name])
        needs = _draw_needs(panel, report, axis, metrics[0] if metrics else "", colors)
        panel.set(xlabel=AXES[axis], title=f"at equal {AXES[axis]}", ylim=_loss_range(runs, metrics))
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(lambda value, _: format_count(value))
        if axis == "tokens" or needs:
            _add_legend(figure, panel, panel.get_lines() if axis == "tokens" else needs)
    axes[0].set_ylabel("loss (nats per token)")
    save(figure, path)


def _add_legend(figure: Any, panel: Any, lines: Sequence[Any]) -> None:
    """In the panel, or under both where it would cover the curves."""
    named = [line for line in lines if not line.get_label().startswith("_")]
    if len(named) > MOST_IN_PANEL:
        figure.legend(handles=named, fontsize=8, loc="outside lower center", ncols=2)
    else:
        panel.legend(handles=named, fontsize=8, loc="upper right")


def _drawn(report: Dict[str, Any]) -> List[str]:
    compared = [comparison["metric"] for comparison in report["comparisons"]]
    return [metric for metric in STYLES if metric in compared]


def _loss_range(runs: Sequence[Run], metrics: Sequence[str]) -> Tuple[Optional[float], Optional[float]]:
    """Losses from the lowest one to the highest after EARLY of a run, so that its start does not flatten the rest."""
    curves = [run.curves[metric] for run in runs for metric in metrics if metric in run.curves]
    late = [curve.at("tokens", max(curve.x["tokens"][0], EARLY * curve.x["tokens"][-1])) for curve in curves]
    if not curves:
        return None, None
    low = min(min(curve.y) for curve in curves)
    last = max(curve.y[-1] for curve in curves)
    high = max(min(late), last)
    margin = 0.08 * (high - low) or 0.1
    return low - 2 * margin, high + margin


def _draw_curve(panel: Any, run: Run, metric: str, axis: str, color: str) -> None:
    repeated = metric == "pass_1" and "last_pass" in run.curves and run.curves["pass_1"].y == run.curves["last_pass"].y
    if metric in run.curves and not repeated:
        curve = run.curves[metric]
        marker = "" if metric == "training" else "o"
        label = plain_text(f"{run.name}: {METRICS[metric]}")
        panel.plot(curve.x[axis], curve.y, STYLES[metric], color=color, marker=marker, markersize=3, label=label)


def _draw_needs(panel: Any, report: Dict[str, Any], axis: str, metric: str, colors: Dict[str, str]) -> List[Any]:
    """Level lines from where a run ends to where the baseline has the same loss; they are returned."""
    lines = []
    for found in report["comparisons"]:
        if (found["axis"], found["metric"], found["status"]) == (axis, metric, "reached"):
            level, color = found["final_loss"], colors[found["run"]]
            ends = (found["final_at"], found["baseline_needs"])
            needed = f"for {level:.3f}, {report['baseline']} needs {found['ratio']:.2f}x the {AXES[axis]}"
            label = plain_text(needed)
            lines += panel.plot(ends, (level, level), "-.", color=color, linewidth=1, label=label)
            panel.plot(ends[1:], [level], "x", color=color)
    return lines
