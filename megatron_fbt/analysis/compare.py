"""Runs side by side at equal tokens and at equal token-equivalents, which is equal training compute."""

import os
from typing import Any, Dict, List, Optional, Sequence

from megatron_fbt.analysis.curves import AXES, METRICS, Curve, Run, read_run
from megatron_fbt.errors import ConfigError
from megatron_fbt.training.console import format_count

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Where the common range of two curves is looked at."""
PAPER_CLAIM = "the paper reports that its baseline needs 1.5 to 2 times the tokens for the same loss"
SAME_LOSSES = {
    "model.vocab_size": "the vocabularies differ, so losses per token are not comparable",
    "data.tokenizer.path": "the tokenizers differ: unless it is one file in two places, losses are not comparable",
    "data.paths": "the data sets differ, so losses compare data as well",
    "data.split": "the splits differ, so validation is on other documents",
    "data.sequence_length": "the row lengths differ, and a longer context alone gives lower losses",
    "training.eval_iters": "validation is on different numbers of rows",
}
SAME_COURSE = (
    "training.train_steps",
    "training.train_samples",
    "training.train_tokens",
    "training.global_batch_size",
    "data.sequence_length",
    "optimizer.type",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.lr_decay_style",
    "optimizer.lr_decay_fraction",
    "optimizer.lr_warmup_steps",
)
"""What the learning rate at a token follows from."""
SAME_COMPUTE = ("model.num_layers", "model.hidden_size", "model.ffn_hidden_size", "data.sequence_length")


def read_runs(folders: Sequence[str], baseline: Optional[str] = None) -> List[Run]:
    """Read the folders, the baseline first; runs in folders of one name are called by their paths.

    Raises:
        ConfigError: Fewer than two different folders.
        DataError: See read_run.
    """
    ordered = list(folders) if baseline is None else [baseline, *folders]
    places = [os.path.realpath(folder) for folder in ordered]
    unique = [folder for index, folder in enumerate(ordered) if places[index] not in places[:index]]
    if baseline is None and len(unique) < len(ordered):
        raise ConfigError(f"runs {', '.join(ordered)}: one folder is named twice; name different ones")
    if len(unique) < 2:
        raise ConfigError("a comparison needs at least two run folders")
    names = [os.path.basename(os.path.realpath(folder)) for folder in unique]
    distinct = len(set(names)) == len(names)
    return [read_run(folder, name if distinct else folder) for folder, name in zip(unique, names)]


def compare_runs(runs: Sequence[Run]) -> Dict[str, Any]:
    """Compare each run with the first one.

    Returns:
        runs (name, path, tokens, token_equivalents, notes), baseline, warnings, comparisons.
    """
    first = runs[0]
    comparisons = []
    for run in runs[1:]:
        for metric, counterpart in _metrics(first, run).items():
            comparisons += [_compare(first, run, metric, counterpart, axis) for axis in AXES]
    return {
        "baseline": first.name,
        "runs": [
            {key: getattr(run, key) for key in ("name", "path", "tokens", "token_equivalents", "notes")} for run in runs
        ],
        "warnings": list(dict.fromkeys(warning for run in runs[1:] for warning in _warnings(first, run))),
        "comparisons": comparisons,
    }


def _metrics(baseline: Run, run: Run) -> Dict[str, str]:
    """{loss of the run: loss of the baseline to compare it with}: validation losses, or else the training loss.

    Decoding of a run without feedback is its pass 1; but where data do not mark answers, SOFT is scored on the second
    half of each row only, so it has no counterpart there.
    """
    both = {metric: metric for metric in METRICS if metric in baseline.curves and metric in run.curves}
    training = both.pop("training", None)
    marked = run.setting("data.format") not in (None, "indexed")
    if "soft" in run.curves and "soft" not in both and "pass_1" in baseline.curves and marked:
        both["soft"] = "pass_1"
    return both or ({"training": training} if training else {})


def _compare(baseline: Run, run: Run, metric: str, counterpart: str, axis: str) -> Dict[str, Any]:
    theirs, mine = baseline.curves[counterpart], run.curves[metric]
    low, high = max(theirs.x[axis][0], mine.x[axis][0]), min(theirs.x[axis][-1], mine.x[axis][-1])
    points = []
    for x in [low + fraction * (high - low) for fraction in FRACTIONS] if low <= high else []:
        loss, other = mine.at(axis, x), theirs.at(axis, x)
        points.append({"at": x, "loss": loss, "baseline_loss": other, "difference": loss - other})
    return {
        "run": run.name,
        "metric": metric,
        "baseline_metric": counterpart,
        "axis": axis,
        "common_range": [low, high] if points else None,
        "points": points,
        **_needs(theirs, axis, mine.y[-1], mine.x[axis][-1]),
    }


def _needs(baseline: Curve, axis: str, loss: float, work: float) -> Dict[str, Any]:
    """How much work the baseline needs for a loss that another run has after `work`."""
    needed = baseline.first_reach(axis, loss)
    status = "not reached" if needed is None else "from the start" if baseline.y[0] <= loss else "reached"
    return {
        "final_loss": loss,
        "final_at": work,
        "status": status,
        "baseline_needs": needed,
        "baseline_end": baseline.x[axis][-1],
        "ratio": needed / work if status == "reached" else None,
    }


def _warnings(baseline: Run, run: Run) -> List[str]:
    pair = f"{baseline.name} and {run.name}"
    found = [f"{pair}: {text}" for text in _setting_differences(baseline, run)]
    for one in (baseline, run):
        if not one.config:
            found.append(f"{one.name}: no readable config.yaml, so it is not known whether its losses are comparable")
    shared = _metrics(baseline, run)
    if "training" in shared:
        found.append(f"{pair}: no validation in both of them; the training loss of pass 1 is compared instead")
    elif not shared:
        found.append(f"{pair}: no loss that both of them have")
    if "soft" in run.curves and "soft" not in shared:
        found.append(
            f"{pair}: only {run.name} has a loss under the recurrence, on the second half of each row: left out; "
            "tools/fixed_point.py measures exports of both on the same positions"
        )
    return found


def _setting_differences(baseline: Run, run: Run) -> List[str]:
    found = []
    for name, meaning in SAME_LOSSES.items():
        values = baseline.setting(name), run.setting(name)
        if None not in values and values[0] != values[1]:
            found.append(f"{meaning} ({name}: {values[0]} and {values[1]})")
    sizes = [[one.setting(name) for name in SAME_COMPUTE] for one in (baseline, run)]
    if baseline.config and run.config and sizes[0] != sizes[1]:
        found.append("models or rows differ in size, so equal token-equivalents are not equal compute")
    if baseline.config and run.config:
        differing = [name for name in SAME_COURSE if baseline.setting(name) != run.setting(name)]
        if differing:
            found.append(
                f"lengths or learning rates differ ({', '.join(differing)}): the loss falls most while the learning "
                "rate decays, so look first at where both runs end"
            )
    return found


def describe(report: Dict[str, Any]) -> str:
    """The report for a person."""
    lines = []
    for index, run in enumerate(report["runs"]):
        role = " (baseline)" if index == 0 else ""
        work = f"{run['tokens']:,} tokens, {run['token_equivalents']:,} token-equivalents so far"
        lines += [f"{run['name']}{role}: {work}", *(f"  note: {note}" for note in run["notes"])]
    for warning in report["warnings"]:
        lines.append(f"warning: {warning}")
    heading = None
    for comparison in report["comparisons"]:
        if heading != (comparison["run"], comparison["metric"]):
            heading = (comparison["run"], comparison["metric"])
            counterpart = "" if comparison["baseline_metric"] == comparison["metric"] else " in pass 1"
            title = f"{METRICS[comparison['metric']]}: {comparison['run']} against {report['baseline']}{counterpart}"
            lines += ["", title]
        lines.append(f"  {_equal_work(comparison, report['baseline'])}")
        lines.append(f"    {need_sentence(comparison, report['baseline'])}")
    closing = (
        f"For comparison, {PAPER_CLAIM}. Losses in nats per token, on straight lines between measurements; nothing "
    )
    return "\n".join([*lines, "", closing + "is extrapolated."])


def _equal_work(comparison: Dict[str, Any], baseline: str) -> str:
    unit = AXES[comparison["axis"]]
    if not comparison["points"]:
        return f"at equal {unit}: the measured ranges do not overlap"
    last = comparison["points"][-1]
    return (
        f"at equal {unit} ({format_count(last['at'])}): {comparison['run']} {last['loss']:.4f}, "
        f"{baseline} {last['baseline_loss']:.4f}, difference {last['difference']:+.4f}"
    )


def need_sentence(comparison: Dict[str, Any], baseline: str) -> str:
    """How much the baseline needs for the other run's final loss."""
    unit, ratio = AXES[comparison["axis"]], comparison["ratio"]
    work = format_count(comparison["final_at"])
    goal = f"for {comparison['final_loss']:.4f}, which {comparison['run']} has after {work}"
    if comparison["status"] == "not reached":
        return f"{goal}: not reached by {baseline} within its {format_count(comparison['baseline_end'])} {unit}"
    needed = format_count(comparison["baseline_needs"])
    if comparison["status"] == "from the start":
        return f"{goal}: {baseline} was there at its first measurement, with {needed} {unit}"
    return f"{goal}: {baseline} needs {needed}, {ratio:.2f}x the {unit}"
