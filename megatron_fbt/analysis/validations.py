"""A run's validations as a table: the loss of each parallel pass, and under the recurrence that decoding follows."""

import re
from pathlib import Path
from typing import Any, Dict, List, Optional

from megatron_fbt.analysis.curves import without_cut_rows
from megatron_fbt.errors import DataError
from megatron_fbt.training.console import VALIDATION_FIELD, pass_values
from megatron_fbt.training.metrics import number, read_metrics

SEQUENTIAL = re.compile(r"validation_loss_(soft|soft_trained|fused_\d+)")
"""Fields of the losses under the recurrence."""


def read_validations(run: str) -> List[Dict[str, Any]]:
    """[{"step", "losses": [loss of pass 1, ...], "sequential": {"soft": loss, "soft_trained": ..., "fused_1": ...}}].

    A loss that was not finite is None; `sequential` is empty where only the passes were measured. Where steps were
    executed again, their later validation holds.

    Raises:
        DataError: There is no such run folder, or no validation in it.
    """
    path, found = Path(run) / "metrics.jsonl", []
    if not path.is_file():
        raise DataError(f"run {run}: no metrics.jsonl there; name the run.dir of a run that has trained")
    for row in without_cut_rows(read_metrics(path), []):
        losses = pass_values(row, VALIDATION_FIELD)
        if losses:
            sequential = {match[1]: number(row[name]) for name in row if (match := SEQUENTIAL.fullmatch(name))}
            found.append({"step": row["step"], "losses": losses, "sequential": sequential})
    if not found:
        raise DataError(f"{path}: no row has {VALIDATION_FIELD.format(1)}; has the run got as far as a validation?")
    return found


def describe(validations: List[Dict[str, Any]], entropy: Optional[float]) -> str:
    """A line for each validation; `-` where something was not measured.

    Args:
        validations: Of read_validations.
        entropy: The corpus's unigram entropy, nats per token; None = it is not told.
    """
    passes = max(len(row["losses"]) for row in validations)
    names = list(dict.fromkeys(name for row in validations for name in row["sequential"]))
    heads = [f"pass {k}" for k in range(1, passes + 1)] + [name.replace("_", " ") for name in names]
    lines = ["  ".join([f"{'step':>8}"] + [f"{head:>12}" for head in heads])]
    for row in validations:
        cells = [_text(loss) for loss in row["losses"]] + ["-"] * (passes - len(row["losses"]))
        cells += [_text(row["sequential"][name]) if name in row["sequential"] else "-" for name in names]
        lines.append("  ".join([f"{row['step']:>8}"] + [f"{cell:>12}" for cell in cells]))
    if names:
        lines.append(
            "under the recurrence that decoding follows, on answers after prompts alone: soft (plain prompt), "
            "soft trained (the trained number of passes instead), fused n (a prompt of n fused passes)"
        )
    if entropy is not None:
        lines.append(f"unigram entropy of the corpus: {entropy:.4f} nats per token")
    return "\n".join(lines)


def _text(loss: Optional[float]) -> str:
    return "non-finite" if loss is None else f"{loss:.4f}"
