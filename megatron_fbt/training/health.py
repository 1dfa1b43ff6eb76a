"""What the measured numbers of a step say about feedback: gains over the plain pass, and warnings."""

import math
from typing import Dict, List, Mapping, Optional, Sequence

from megatron_fbt.config.feedback import FeedbackConfig


def gains(loss_per_pass: Sequence[float]) -> Dict[str, float]:
    """By how much each extra pass is better than pass 1: {"gain_pass_2": nats, ...}."""
    return {f"gain_pass_{k}": loss_per_pass[0] - loss for k, loss in enumerate(loss_per_pass[1:], start=2)}


def warnings(row: Mapping[str, Optional[float]], config: FeedbackConfig) -> List[str]:
    """Signs in a row of metrics.jsonl that decoding will not have the quality of the trained passes."""
    found = []
    for kind in ("", "validation_"):
        k = 2
        while row.get(f"{kind}update_norm_pass_{k + 1}") is not None:
            now, later = row[f"{kind}update_norm_pass_{k}"], row[f"{kind}update_norm_pass_{k + 1}"]
            if not later <= now:  # a NaN too
                found.append(
                    f"pass {k + 1} changes the states more than pass {k} did ({kind}update_norm {later:.3g} after "
                    f"{now:.3g}): the feedback map is no contraction; more three-pass batches help"
                )
            k += 1
    soft, trained = row.get("validation_loss_soft"), row.get("validation_loss_soft_trained")
    margin = config.sequential_eval.margin
    if soft is not None and trained is not None and not soft - trained <= margin:
        found.append(
            f"decoding in SOFT will be worse than the trained passes: loss {soft:.4f} under the recurrence, "
            f"{trained:.4f} after {config.max_passes} passes (feedback.sequential_eval.margin = "
            f"{margin:g}); train more batches with three passes or more"
        )
    for name, fused in row.items():
        if name.startswith("validation_loss_fused_") and None not in (soft, fused):
            if not fused - soft <= margin:
                found.append(
                    f"prompts are better left plain: loss {fused:.4f} after fused passes over the prompt, {soft:.4f} "
                    "after a plain one (decode in SOFT); prompts were not fused in training"
                )
    return found


def last_pass_validation(row: Mapping[str, Optional[float]]) -> Optional[float]:
    """Validation loss of the largest number of passes in a row of metrics.jsonl; None where none or no number is."""
    k = 1
    while row.get(f"validation_loss_pass_{k + 1}") is not None:
        k += 1
    loss = row.get(f"validation_loss_pass_{k}")
    return loss if loss is not None and math.isfinite(loss) else None
