"""Loss curves of training runs, read from their folders; questions asked of them without extrapolation."""

import json
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

import yaml

from megatron_fbt.errors import DataError
from megatron_fbt.training.console import VALIDATION_FIELD, pass_values
from megatron_fbt.training.metrics import number, read_metrics

AXES = {"tokens": "tokens", "token_equivalents": "token-equivalents"}
"""Fields of metrics.jsonl that count work, with their names for people."""
METRICS = {
    "last_pass": "validation loss, last pass",
    "best_pass": "validation loss, best pass",
    "pass_1": "validation loss, pass 1",
    "soft": "validation loss, decoding in SOFT",
    "training": "training loss, pass 1 (running mean)",
}
SMOOTHING = 20
"""Training steps in the running mean."""


@dataclass
class Curve:
    """A loss over the work done: `x[axis]` (rising) and `y`, of equal length."""

    x: Dict[str, List[float]] = field(default_factory=lambda: {axis: [] for axis in AXES})
    y: List[float] = field(default_factory=list)

    def add(self, row: Mapping[str, Any], loss: float) -> None:
        """Append a point."""
        for axis in AXES:
            self.x[axis].append(row[axis])
        self.y.append(loss)

    def at(self, axis: str, x: float) -> Optional[float]:
        """The loss at x, on the straight line between the points beside it; None outside of the measured range."""
        xs = self.x[axis]
        if not xs or not xs[0] <= x <= xs[-1]:
            return None
        right = bisect_left(xs, x)
        if xs[right] == x:
            return self.y[right]
        share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
        return self.y[right - 1] + share * (self.y[right] - self.y[right - 1])

    def first_reach(self, axis: str, loss: float) -> Optional[float]:
        """Where the curve first comes down to a loss, on the straight line between points; None = nowhere.

        A curve that starts at the loss or below it gives its first x: it may have been there before.
        """
        xs = self.x[axis]
        for index, value in enumerate(self.y):
            if value <= loss:
                if index == 0 or value == loss:
                    return xs[index]
                share = (self.y[index - 1] - loss) / (self.y[index - 1] - value)
                return xs[index - 1] + share * (xs[index] - xs[index - 1])
        return None


@dataclass
class Run:
    """A run folder as a comparison sees it.

    Attributes:
        name: How it is called in tables.
        path: Its folder.
        curves: By the names of METRICS, those that have points.
        config: config.yaml as it stands; empty if there is none.
        tokens, token_equivalents: So far.
        notes: What a reader should know about the rows.
    """

    name: str
    path: str
    curves: Dict[str, Curve]
    config: Dict[str, Any]
    tokens: float
    token_equivalents: float
    notes: List[str]

    def setting(self, name: str) -> Any:
        """A dotted field of config.yaml; None where it is not known."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def without_cut_rows(rows: Iterable[Mapping[str, Any]], needed: Sequence[str]) -> List[Mapping[str, Any]]:
    """Rows in the order of their steps; where a run was started again, the later row of a step holds.

    Args:
        rows: In the order of the file.
        needed: Fields without which, as finite numbers that are not negative, a row is left out; `step` is always.
    """
    kept: List[Mapping[str, Any]] = []
    for row in rows:
        if any((value := number(row.get(name))) is None or value < 0 for name in ("step", *needed)):
            continue
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def read_run(folder: str, name: Optional[str] = None) -> Run:
    """Read a run folder, also one whose run goes on.

    Raises:
        DataError: No such folder, no metrics.jsonl, or no row with a loss in it.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"run {folder}: no such folder; name the run.dir of a training run")
    if not (path / "metrics.jsonl").is_file():
        raise DataError(f"run {folder}: no metrics.jsonl in it; name the run.dir of a run that has trained")
    found = read_metrics(path / "metrics.jsonl")
    rows = without_cut_rows(found, list(AXES))
    curves = {"training": _training_curve(rows), **_validation_curves(rows)}
    curves = {metric: curve for metric, curve in curves.items() if curve.y}
    if not curves:
        raise DataError(f"run {folder}: no row of its metrics.jsonl has a finite loss, tokens and token_equivalents")
    notes = []
    if len(rows) < len(found):
        notes.append(f"{len(found) - len(rows)} rows belong to steps that were executed again, or are not whole")
    if bad := [row["step"] for row in rows if any(number(row[name]) is None for name in row if "loss_pass_" in name)]:
        notes.append(f"losses that are not finite are left out; steps with such: {len(bad)}, the last is {bad[-1]}")
    if (state := _state(path)) not in (None, "finished"):
        notes.append(f"status.json says that it is {state}, not finished: its last losses are not those of a whole run")
    tokens, equivalents = rows[-1]["tokens"], rows[-1]["token_equivalents"]
    return Run(name or path.resolve().name, str(folder), curves, _read_config(path), tokens, equivalents, notes)


def _validation_curves(rows: List[Mapping[str, Any]]) -> Dict[str, Curve]:
    curves = {metric: Curve() for metric in ("last_pass", "best_pass", "pass_1", "soft")}
    for row in rows:
        losses = pass_values(row, VALIDATION_FIELD)
        values = {"soft": number(row.get("validation_loss_soft"))}
        if losses:
            finite = [loss for loss in losses if loss is not None]
            values.update(last_pass=losses[-1], pass_1=losses[0], best_pass=min(finite, default=None))
        for metric, value in values.items():
            if value is not None:
                curves[metric].add(row, value)
    return curves


def _training_curve(rows: List[Mapping[str, Any]]) -> Curve:
    curve, recent = Curve(), []
    for row in rows:
        if (loss := number(row.get("loss_pass_1"))) is not None:
            recent = [*recent, loss][-SMOOTHING:]
            curve.add(row, sum(recent) / len(recent))
    return curve


def _state(path: Path) -> Optional[str]:
    try:
        return json.loads((path / "status.json").read_text(encoding="utf-8"))["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_config(path: Path) -> Dict[str, Any]:
    try:
        content = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
