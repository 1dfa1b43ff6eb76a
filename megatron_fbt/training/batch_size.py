"""Global batch size over a run: constant, or growing in equal increments over the first samples."""

from typing import Iterator, NamedTuple, Optional, Tuple

from megatron_fbt.config.training import TrainingConfig

NOTHING_DONE = (0, 0)
"""Steps and samples of a new run."""


class BatchSizeLevel(NamedTuple):
    """A stretch of steps with one global batch size."""

    first_step: int
    """Steps are counted from 0."""
    end_step: Optional[int]
    """First step after the stretch; None for the last one, which has no end."""
    first_sample: int
    """Samples consumed before its first step."""
    global_batch_size: int
    """Rows in one step."""


class BatchSizeSchedule:
    """A pure function of the number of consumed samples, in integer arithmetic: a resume needs no other state.

    With rampup_batch_size [start, increment, samples] there are n = (global_batch_size - start) / increment
    increments, one after every samples / n consumed samples.
    """

    def __init__(self, training: TrainingConfig, data_parallel_size: int):
        """Take the sizes of a validated configuration.

        Args:
            training: section `training`.
            data_parallel_size: ranks over which a global batch is split.
        """
        self._full = training.global_batch_size
        self._rows_per_micro_step = training.micro_batch_size * data_parallel_size
        start, increment, samples = training.rampup_batch_size or (self._full, 1, 0)
        self._start, self._increment, self._samples = start, increment, samples
        self._increments = (self._full - start) // increment

    def global_batch_size(self, consumed_samples: int) -> int:
        """Rows of the step that follows `consumed_samples` rows."""
        if self._increments == 0 or consumed_samples >= self._samples:
            return self._full
        return self._start + self._increment * (consumed_samples * self._increments // self._samples)

    def num_microbatches(self, consumed_samples: int) -> int:
        """Micro-batches of each data-parallel rank in that step."""
        return self.global_batch_size(consumed_samples) // self._rows_per_micro_step

    def levels(self, step: int = 0, consumed: int = 0) -> Iterator[BatchSizeLevel]:
        """The batch sizes that a run meets after so many steps and samples, in order."""
        while consumed < self._samples and self._increments:
            size = self.global_batch_size(consumed)
            index = (size - self._start) // self._increment
            boundary = -(-(index + 1) * self._samples // self._increments)
            steps = -(-(boundary - consumed) // size)
            yield BatchSizeLevel(step, step + steps, consumed, size)
            step, consumed = step + steps, consumed + steps * size
        yield BatchSizeLevel(step, None, consumed, self._full)

    def total_steps(self, train_samples: int, done: Tuple[int, int] = NOTHING_DONE) -> int:
        """Smallest number of steps that consumes at least `train_samples` rows, with those done."""
        first, *later = self.levels(*done)
        level = [first, *(level for level in later if level.first_sample < train_samples)][-1]
        return max(done[0], level.first_step - (level.first_sample - train_samples) // level.global_batch_size)

    def samples_after(self, steps: int, done: Tuple[int, int] = NOTHING_DONE) -> int:
        """Rows consumed by the first `steps` steps, of which some are done."""
        first, *later = self.levels(*done)
        level = [first, *(level for level in later if level.first_step <= steps)][-1]
        return level.first_sample + max(0, steps - level.first_step) * level.global_batch_size


def run_length(training: TrainingConfig, sequence_length: int, done: Tuple[int, int] = NOTHING_DONE) -> Tuple[int, int]:
    """Optimizer steps of a run and the rows they consume.

    A length given in samples or tokens is rounded up to whole rows and then to whole global batches.

    Args:
        training: section `training`, with exactly one of train_steps, train_samples, train_tokens.
        sequence_length: tokens in a row.
        done: steps and rows of a run that goes on, whatever their batches were; what remains follows from `training`.

    Returns:
        (train_steps, train_samples), the latter in rows.
    """
    schedule = BatchSizeSchedule(training, data_parallel_size=1)
    steps = training.train_steps
    if steps is None:
        samples = training.train_samples
        if samples is None:
            samples = -(-training.train_tokens // sequence_length)
        steps = schedule.total_steps(samples, done)
    return steps, schedule.samples_after(steps, done)
