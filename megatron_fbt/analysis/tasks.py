"""Synthetic tasks that need a state carried from position to position, as rows with labels of their own.

parity   random bits; every position is asked for the parity of the bits so far
fsm      random letters; every position is asked for the state of a fixed random automaton after them
cot5     digits mod 5, '=', then one binary token for each digit: whether the sum so far, mod 5, is at least 3. The
         tokens are written by the model and lose information: the sum itself is nowhere in the text
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Optional, Union

import torch
from torch import Tensor

from megatron_fbt.data.labelled import NO_LOSS
from megatron_fbt.errors import ConfigError

STATES, LETTERS = 6, 4
"""Of the automaton."""
TABLE_SEED = 123
BASE = 5
THRESHOLD = 3
"""cot5 tells whether the sum mod BASE is at least this."""


@dataclass(frozen=True)
class TaskRows:
    """Rows of a task.

    Attributes:
        input_ids: [N, T] int64.
        labels: [N, T] int64, what position t is scored against; -100 = nothing.
        feedback: [T] bool, the positions whose token the model writes; None = all, there is no prompt.
    """

    input_ids: Tensor
    labels: Tensor
    feedback: Optional[Tensor] = None


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        vocab_size: Token ids; those of inputs and answers are different ones.
        rows: Makes N rows of T tokens with a generator.
    """

    vocab_size: int
    rows: Callable[[int, int, torch.Generator], TaskRows]


def automaton_table() -> Tensor:
    """[STATES, LETTERS] int64: the state after a letter; drawn once and for all."""
    return torch.randint(0, STATES, (STATES, LETTERS), generator=torch.Generator().manual_seed(TABLE_SEED))


def parity_rows(count: int, length: int, generator: torch.Generator) -> TaskRows:
    """Inputs 0 and 1; answers 2 (even) and 3 (odd)."""
    bits = torch.randint(0, 2, (count, length), generator=generator)
    return TaskRows(bits, 2 + bits.cumsum(1) % 2)


def automaton_rows(count: int, length: int, generator: torch.Generator) -> TaskRows:
    """Inputs: LETTERS letters; answers: LETTERS + state. Every row starts in state 0."""
    letters = torch.randint(0, LETTERS, (count, length), generator=generator)
    table, state, states = automaton_table(), torch.zeros(count, dtype=torch.int64), []
    for t in range(length):
        state = table[state, letters[:, t]]
        states.append(state)
    return TaskRows(letters, LETTERS + torch.stack(states, 1))


def cot5_rows(count: int, length: int, generator: torch.Generator) -> TaskRows:
    """Inputs: length / 2 digits, '=' (5), the answers but the last; answers 6 (sum mod 5 below 3) and 7, from '=' on.

    Raises:
        ValueError: length is odd.
    """
    if length % 2:
        raise ValueError(f"length={length}: must be even, half of it are digits")
    half = length // 2
    digits = torch.randint(0, BASE, (count, half), generator=generator)
    answers = BASE + 1 + (digits.cumsum(1) % BASE >= THRESHOLD).long()
    text = torch.cat((digits, torch.full((count, 1), BASE), answers), 1)
    labels = text[:, 1:].clone()
    labels[:, :half] = NO_LOSS
    return TaskRows(text[:, :-1], labels, torch.arange(length) > half)


TASKS: Dict[str, Task] = {
    "parity": Task(4, parity_rows),
    "fsm": Task(LETTERS + STATES, automaton_rows),
    "cot5": Task(BASE + 3, cot5_rows),
}


def write_rows(rows: TaskRows, path: Union[str, Path]) -> None:
    """Write rows as data.format labelled reads them.

    Raises:
        ConfigError: The file cannot be written.
    """
    mark = {} if rows.feedback is None else {"feedback": rows.feedback.int().tolist()}
    try:
        with open(path, "w", encoding="utf-8") as file:
            for ids, labels in zip(rows.input_ids.tolist(), rows.labels.tolist(), strict=True):
                file.write(json.dumps({"input_ids": ids, "labels": labels, **mark}) + "\n")
    except OSError as error:
        raise ConfigError(f"output {path}: cannot be written ({error.strerror or error})") from error
