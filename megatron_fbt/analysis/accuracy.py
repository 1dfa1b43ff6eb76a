"""How often an exported model is right on labelled rows: by parallel passes, and when it writes by itself."""

from dataclasses import dataclass
from typing import Any, Dict, Sequence

import torch
from torch import Tensor

from megatron_fbt.analysis.fixed_point import pass_states
from megatron_fbt.analysis.tasks import TaskRows
from megatron_fbt.data.labelled import NO_LOSS
from megatron_fbt.errors import BadNumbersError


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers.

    Attributes:
        tokens: Of all answers.
        whole: Rows whose answers are all right.
        by_position: [answers of a row] in their order.
    """

    tokens: float
    whole: float
    by_position: Sequence[float]


def measure(right: Tensor, scored: Tensor) -> Accuracy:
    """Accuracy of answers.

    Args:
        right: [N, T] bool.
        scored: [T] bool, the positions that have an answer, the same ones in all rows.
    """
    answers = right[:, scored]
    by_position = answers.double().mean(0).tolist()
    return Accuracy(answers.double().mean().item(), answers.all(1).double().mean().item(), by_position)


@torch.no_grad()
def accuracy_by_passes(model: Any, rows: TaskRows, passes: Sequence[int]) -> Dict[int, Accuracy]:
    """Accuracy of the given numbers of parallel passes over whole rows; T passes are the recurrence itself.

    What is not in the feedback region stays plain, as in training.

    Args:
        model: An exported model, in evaluation mode.
        rows: Of a task; labels on the same positions in all rows.
        passes: Each from 1 to T.

    Raises:
        BadNumbersError: A state is not finite.
    """
    plain = None if rows.feedback is None else (~rows.feedback).expand_as(rows.input_ids)
    scored, found = rows.labels[0] != NO_LOSS, {}
    for k, state in enumerate(pass_states(model, rows.input_ids, max(passes), plain), start=1):
        if not state.isfinite().all():
            raise BadNumbersError(f"the states of pass {k} are not finite; the model's weights are bad")
        if k in passes:
            found[k] = measure(model.lm_head(state).argmax(-1) == rows.labels, scored)
    return found


@torch.no_grad()
def generation_accuracy(model: Any, rows: TaskRows, regime: str) -> Accuracy:
    """Accuracy of answers that the model writes by itself, greedily, after the prompt.

    Args:
        model: An exported model, in evaluation mode.
        rows: Of a task whose answers are generated: the prompt ends where the feedback region begins.
        regime: Of model.generate.
    """
    answers = rows.labels[:, rows.labels[0] != NO_LOSS]
    prompt = rows.input_ids[:, ~rows.feedback]
    written = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        regime=regime,
        max_new_tokens=answers.shape[1],
        min_new_tokens=answers.shape[1],
        do_sample=False,
    )[:, prompt.shape[1] :]
    return measure(written == answers, torch.ones(answers.shape[1], dtype=torch.bool))
