"""How often an exported model is right on labelled rows: by parallel passes, and when it writes by itself."""

from dataclasses import dataclass
from typing import Any, Dict, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fbt.analysis.fixed_point import pass_states
from megatron_fbt.analysis.tasks import TaskRows
from megatron_fbt.data.labelled import NO_LOSS


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
    """
    plain = None if rows.feedback is None else (~rows.feedback).expand_as(rows.input_ids)
    scored, found = rows.labels[0] != NO_LOSS, {}
    for k, state in enumerate(pass_states(model, rows.input_ids, max(passes), plain), start=1):
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


@torch.no_grad()
def layer_inputs(model: Any, input_ids: Tensor, fused_passes: int) -> Tensor:
    """What the first layer reads in a pass over whole rows, [N, T, D]: plain (0), or the n-th fused pass after it."""
    plain, token = model.model.embed(input_ids)
    if fused_passes == 0:
        return plain
    *_, states = pass_states(model, input_ids, fused_passes)
    fused = model.model.fusion(token[:, 1:], states[:, :-1])
    return torch.cat((plain[:, :1], fused), 1)


def probe_accuracy(vectors: Tensor, facts: Tensor, classes: int, steps: int = 120, lr: float = 3e-2) -> float:
    """Accuracy of a linear probe, fitted on the first half of the rows and tested on the others.

    Args:
        vectors: [N, T, D].
        facts: [N, T] int64 below classes.
        classes: Number of values of the fact.
        steps: Steps of Adam on all rows of the first half.
        lr: Its learning rate.
    """
    half, width = len(vectors) // 2, vectors.shape[-1]
    seen, held_out = (part.flatten(0, 1) for part in vectors.split([half, len(vectors) - half]))
    truth, held_out_truth = (part.flatten() for part in facts.split([half, len(facts) - half]))
    weight = torch.zeros(classes, width, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(F.linear(seen, weight, bias), truth).backward()
        optimizer.step()
    guesses = F.linear(held_out, weight, bias).argmax(-1)
    return (guesses == held_out_truth).double().mean().item()
