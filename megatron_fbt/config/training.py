"""Length of a run and its batches."""

from dataclasses import dataclass
from typing import List, Optional


@dataclass
class TrainingConfig:
    """Exactly one of train_steps, train_samples, train_tokens gives the length of the run."""

    train_steps: Optional[int] = None
    """Optimizer steps."""
    train_samples: Optional[int] = None
    """Rows of sequence_length tokens."""
    train_tokens: Optional[int] = None
    """Tokens, each counted once whatever the number of passes."""
    micro_batch_size: int = 1
    """Rows in one forward pass of one data-parallel rank."""
    global_batch_size: int = 8
    """Rows in one optimizer step, over all ranks."""
    rampup_batch_size: Optional[List[int]] = None
    """[start, increment, samples]: grow the global batch from start by increments over this many samples."""
    eval_interval: Optional[int] = None
    """Steps between validations; null = only at the end of the run."""
    eval_iters: int = 8
    """Global batches in one validation; 0 = no validation."""
    max_bad_steps: int = 10
    """Steps in a row with a non-finite loss or gradient after which the run ends."""
