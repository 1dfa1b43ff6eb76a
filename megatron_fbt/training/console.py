"""The console line of a training step, and the estimate of the time left."""

import math
from typing import Mapping, Optional, Sequence, Union

from megatron_fbt.training.metrics import number

# Fields of a row that hold the loss of pass k, k = 1, 2, ...
LOSS_FIELD = "loss_pass_{}"
VALIDATION_FIELD = "validation_loss_pass_{}"


def format_duration(seconds: Optional[float]) -> str:
    """Spell a duration in its two largest units: 8s, 4m05s, 3h07m, 2d04h; `?` where it is not known.

    Args:
        seconds: duration in seconds; None, NaN or infinity mean unknown.
    """
    if seconds is None or not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def format_count(value: float) -> str:
    """Spell a large count with three digits and a unit: 950, 12.3k, 4.00M, 1.25B, 3.00T."""
    if not math.isfinite(value):
        return "?"
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{unit}" if abs(value) >= 99.95 * size else f"{value / size:#.3g}{unit}"
    return f"{value:.0f}"


def pass_values(row: Mapping[str, object], field: str = LOSS_FIELD) -> list:
    """Values of a per-pass field, [value of pass 1, value of pass 2, ...]; empty where the row has none.

    What is not a finite number is None.

    Args:
        row: a row of metrics.jsonl.
        field: `LOSS_FIELD` or `VALIDATION_FIELD`.
    """
    values = []
    while field.format(len(values) + 1) in row:
        values.append(number(row[field.format(len(values) + 1)]))
    return values


def _losses(values: Sequence[Optional[float]]) -> str:
    return " ".join("non-finite" if value is None else f"{value:.4f}" for value in values)


def _number(value: Optional[float], form: str) -> str:
    return "?" if value is None else format(value, form)


def console_line(row: Mapping[str, Union[int, float, None]], train_steps: int, eta_s: Optional[float]) -> str:
    """One line for one step.

    Args:
        row: the step's row of metrics.jsonl: step, passes, loss, loss_pass_1..., grad_norm, lr, tokens_per_second,
            skipped (steps so far without an update, because of non-finite numbers), and where they are known
            model_tflops (model TFLOP/s of the whole run, passes counted), data_wait_share, validation_loss_pass_1...
            and validation_loss_soft.
        train_steps: steps of the whole run.
        eta_s: seconds left, None when unknown.
    """
    width = len(str(train_steps))
    parts = [
        f"step {row['step']:>{width}}/{train_steps}",
        f"K {row['passes']}",
        f"loss {_losses([row['loss']])}",
        f"per pass {_losses(pass_values(row))}",
        f"grad norm {_number(row.get('grad_norm'), '.3f')}",
        f"lr {_number(row.get('lr'), '.3e')}",
        f"{format_count(row['tokens_per_second'])} tokens/s",
    ]
    if row.get("model_tflops") is not None:
        parts.append(f"{row['model_tflops']:.3g} TFLOP/s")
    if row.get("data_wait_share") is not None:
        parts.append(f"data wait {row['data_wait_share']:.1%}")
    parts.append(f"ETA {format_duration(eta_s)}")
    if row.get("skipped"):
        parts.append(f"skipped steps {row['skipped']}")
    validation = pass_values(row, VALIDATION_FIELD)
    if validation:
        parts.append(f"validation per pass {_losses(validation)}")
    if "validation_loss_soft" in row:
        parts.append(f"in SOFT {_losses([row['validation_loss_soft']])}")
    return " | ".join(parts)


class TimeLeft:
    """Estimate of the time left when a step's duration is in proportion to its tokens times its passes.

    The rate is a moving average in which older steps fade; steps with other pass counts or batch sizes
    count by their work, so that the estimate looks ahead to the dearer batches of a later phase.
    """

    def __init__(self, memory: float = 0.95) -> None:
        """Args: memory: weight that a step keeps when the next one comes, 0 <= memory < 1."""
        self._memory = memory
        self._seconds = 0.0
        self._token_passes = 0.0

    def add_step(self, seconds: float, tokens: int, passes: int) -> None:
        """Count one executed step.

        Args:
            seconds: its duration.
            tokens: tokens of its global batch, each once.
            passes: its pass count K.
        """
        self._seconds = self._memory * self._seconds + seconds
        self._token_passes = self._memory * self._token_passes + tokens * passes

    def seconds(self, remaining_token_passes: float) -> Optional[float]:
        """Seconds left; None before the first step.

        Args:
            remaining_token_passes: sum over the steps to come of tokens times (expected) pass count.
        """
        if not self._token_passes:
            return None
        return remaining_token_passes * self._seconds / self._token_passes
