"""The training loop: batches in, optimizer steps, reports and checkpoints out."""

import dataclasses
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.plan import RunPlan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.parallel import Layout, seed_dropout
from megatron_fbt.core.phases import phase
from megatron_fbt.core.schedule import Recipe, run_passes
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.data.batch import BatchReader, MicroBatch, load_micro_batches
from megatron_fbt.data.dataset import Datasets
from megatron_fbt.data.loader import rows_ahead
from megatron_fbt.data.sampler import micro_batch_sample_ids
from megatron_fbt.errors import BadNumbersError, CheckpointError, StoppedBySignal
from megatron_fbt.feedback.diagnostics import PassDiagnostics
from megatron_fbt.feedback.pass_schedule import passes_at
from megatron_fbt.training.batch_size import BatchSizeSchedule
from megatron_fbt.training.build_optimizer import build_optimizer
from megatron_fbt.training.checkpoint import Checkpointer
from megatron_fbt.training.failure import on_first_rank
from megatron_fbt.training.health import gains, last_pass_validation
from megatron_fbt.training.lr_schedule import LearningRate
from megatron_fbt.training.optimizer import StepReport, total_loss
from megatron_fbt.training.reporter import Reporter
from megatron_fbt.training.rewind import go_back, last_good_checkpoint, place_of, recalled, rows_of_samples
from megatron_fbt.training.run_folder import TrainerState, checkpoints_folder, step_folder
from megatron_fbt.training.spikes import SpikeWatch
from megatron_fbt.training.stop import StopRequests
from megatron_fbt.training.stragglers import StragglerWatch
from megatron_fbt.training.validation import Validator


class Trainer:
    """One training run on one rank; every rank runs the same steps.

    Args:
        config: validated, with model.vocab_size resolved.
        plan: derived quantities.
        layout: this process's place.
        datasets: rows for training and validation.
        eod: id of the end-of-document token.
    """

    guard: Callable[[], None] = staticmethod(lambda: None)
    """Called at the end of each step; raises if the run must not go on."""

    def __init__(self, config: PretrainConfig, plan: RunPlan, layout: Layout, datasets: Datasets, eod: int):
        self.config, self.plan, self.layout, self.datasets, self.eod = config, plan, layout, datasets, eod
        self.stage = FBTStage(config, layout, plan.vocab_size, plan.padded_vocab_size)
        self.optimizer = build_optimizer(config, self.stage, layout)
        self.batch_sizes = BatchSizeSchedule(config.training, layout.data_size)
        self.learning_rate = LearningRate(
            config.optimizer, config.optimizer.lr_warmup_steps * config.training.global_batch_size, plan.train_samples
        )
        self.reader = BatchReader(
            tp_group=layout.batch_group,
            tp_rank=layout.tensor_rank,
            is_first_stage=layout.is_first_stage,
            is_last_stage=layout.is_last_stage,
            device=layout.device,
        )
        self.ahead = rows_ahead(config.data.num_workers, datasets.train, eod, self.reader, self._coming_rows)
        self.data_wait_s = 0.0
        self.recipe = Recipe(config.feedback, config.run.seed, training=True)
        self.validator = Validator(config, layout, self.stage, datasets.valid, eod, self.reader, self.optimizer.through)
        self.stragglers = StragglerWatch(config.logging, layout)
        self.folder = Path(config.run.dir)
        self.checkpointer = Checkpointer(checkpoints_folder(config), config.checkpoint, layout)
        self.state = TrainerState(phase_start_steps=list(plan.phase_start_steps))
        self.last_saved: Optional[Path] = None
        self._watch_spikes()

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        with phase(self.config.parallel, self.layout, self.config.parallel.load_timeout_s):
            state = self.checkpointer.load(checkpoint, self.stage, self.optimizer)
        self.state = on_first_rank(lambda: recalled(state, self.folder), self.layout.cpu_group)
        self.state.phase_start_steps = list(self.plan.phase_start_steps)
        self.last_saved = checkpoint
        self._watch_spikes()

    def _watch_spikes(self) -> None:
        state, config = self.state, self.config.training.spikes
        if config.active:
            self.optimizer.judge = SpikeWatch(config, state.recent_losses, state.recent_grad_norms).judge

    def train(self, reporter: Reporter, signals: StopRequests) -> None:
        """Run to the end of the plan.

        Raises:
            StoppedBySignal: a rank was asked to stop; a checkpoint was written.
            BadNumbersError: training.max_bad_steps steps in a row were not finite; none was written.
        """
        try:
            self._train(reporter, signals)
        finally:
            if self.ahead is not None:
                self.ahead.close()

    def _train(self, reporter: Reporter, signals: StopRequests) -> None:
        while self.state.step < self.plan.train_steps:
            began, consumed = time.perf_counter(), self.state.consumed_samples
            row, report = self._step(signals)
            seconds = time.perf_counter() - began
            if self._validation_due():
                row.update(self.validator.run(sequential=self.state.fusion_active))
            tokens = (self.state.consumed_samples - consumed) * self.plan.sequence_length
            reporter.step(row, tokens, seconds, self.state)
            self.stragglers.look(self.state.step, reporter.say)
            if self.state.updates > 0:
                reporter.memory(self.optimizer.held_bytes)
            if self.checkpointer.pending and not report.busy:
                self._finish_save(reporter)
            if self._check_bad_steps(report, reporter, consumed):
                continue
            self.guard()
            self._save_if_due(row, report, reporter, signals)
        if self.last_saved is None or self.last_saved.name != step_folder(self.state.step):
            self._save(reporter)

    def _save_if_due(self, row: Dict, report: StepReport, reporter: Reporter, signals: StopRequests) -> None:
        stop = report.stop_requested and self.state.step < self.plan.train_steps
        if stop or self._save_due():
            self.checkpointer.facts["validation_loss"] = last_pass_validation(row)
            last = stop or self.state.step == self.plan.train_steps
            self._save(reporter, background=self.config.checkpoint.async_save and not last)
        if stop:
            raise StoppedBySignal(
                f"stopped by {_asked(signals)} after step {self.state.step}; {self.last_saved} was written: "
                "the same command resumes from it"
            )

    def _step(self, signals: StopRequests) -> Tuple[Dict, StepReport]:
        """One global batch: its row for the logs, and what the optimizer did."""
        config, state = self.config, self.state
        passes = passes_at(state.step, config.run.seed, self.plan.phase_start_steps, config.feedback.phases)
        if passes > 1 and state.switch_on_step is None:
            state.switch_on_step = state.step
        if config.model.attention_dropout or config.model.hidden_dropout:
            seed_dropout(config.run.seed, state.step)
        lr, recipe = self.learning_rate.apply(self.optimizer, state.consumed_samples), self._recipe()
        diagnostics = PassDiagnostics(passes, self.layout) if self._diagnostics_due() else None
        self.stage.train()
        self.optimizer.zero_grad()
        totals = run_passes(
            self.stage,
            self._micro_batches(),
            passes,
            recipe,
            on_last_backward=self.optimizer.on_last_backward,
            diagnostics=diagnostics,
            through=self.optimizer.through,
        )
        stop = signals.requested is not None
        self.checkpointer.wait_for_copy()
        report = self.optimizer.step(totals, state.fusion_active, stop, self.checkpointer.busy)
        self._count(passes, report)
        row = self._row(passes, lr, report, recipe)
        if diagnostics is not None:
            row.update(diagnostics.reduce())
        return row, report

    def _diagnostics_due(self) -> bool:
        interval = self.config.logging.diagnostics_interval
        return interval is not None and (self.state.step + 1) % interval == 0

    def _recipe(self) -> Recipe:
        """The recipe of the step that begins."""
        step, training = self.state.step, self.config.training
        factor = self.config.feedback.loss_weights.extra_factor(step, self.state.switch_on_step)
        z_loss = training.z_loss.coefficient_at(step, self.plan.train_steps)
        loss_scale = self.optimizer.loss_scale
        return dataclasses.replace(self.recipe, extra_factor=factor, z_loss=z_loss, loss_scale=loss_scale)

    def _micro_batches(self) -> List[MicroBatch]:
        began = time.perf_counter()
        rows = self._rows_of_step(self.state.consumed_samples)
        micro_batches = load_micro_batches(self.datasets.train, rows, self.eod, self.reader, self.ahead)
        self.data_wait_s = time.perf_counter() - began
        return micro_batches

    def _rows_of_step(self, consumed: int) -> List[List[int]]:
        """Rows that this rank reads in the step after so many samples."""
        ids = micro_batch_sample_ids(
            consumed,
            self.batch_sizes.global_batch_size(consumed),
            self.config.training.micro_batch_size,
            self.layout.data_rank,
            self.layout.data_size,
        )
        return rows_of_samples(ids, self.state.left_out, self.plan.train_samples)

    def _coming_rows(self) -> Iterator[List[List[int]]]:
        """The same of the step that begins and those after it, if nothing comes between."""
        consumed = self.state.consumed_samples
        for _ in range(self.plan.train_steps - self.state.step):
            yield self._rows_of_step(consumed)
            consumed += self.batch_sizes.global_batch_size(consumed)

    def _count(self, passes: int, report: StepReport) -> None:
        state = self.state
        rows = self.batch_sizes.global_batch_size(state.consumed_samples)
        state.step += 1
        state.consumed_samples += rows
        state.token_equivalents += rows * self.plan.sequence_length * passes
        state.count_passes(passes)
        state.updates, state.fusion_updates = self.optimizer.updates, self.optimizer.fusion_updates
        state.skipped += int(report.skipped)
        if not report.overflow:
            state.bad_in_a_row = state.bad_in_a_row + 1 if report.skipped else 0
        scaler = self.optimizer.scaler
        state.loss_scaler = [] if scaler is None else scaler.state

    def _row(self, passes: int, lr: float, report: StepReport, recipe: Recipe) -> Dict:
        losses = {f"loss_pass_{k}": loss for k, loss in enumerate(report.loss_per_pass, start=1)}
        weights, factor = self.config.feedback.loss_weights, recipe.extra_factor
        z_loss = {"z_loss": report.z_loss} if self.config.training.z_loss.coefficient else {}
        return {
            "step": self.state.step,
            "passes": passes,
            "loss": total_loss(report.loss_per_pass, weights, factor) + report.z_loss,
            **losses,
            **gains(report.loss_per_pass),
            **z_loss,
            "grad_norm": report.grad_norm,
            "lr": lr,
            **({} if self.optimizer.scaler is None else {"loss_scale": recipe.loss_scale}),
            "tokens": self.state.consumed_samples * self.plan.sequence_length,
            "token_equivalents": self.state.token_equivalents,
            **{f"pass_share_{passes}": share for passes, share in self.state.pass_shares.items()},
            "loss_tokens": report.loss_tokens,
            "skipped": self.state.skipped,
            **({"rewinds": self.state.rewinds} if self.config.training.max_rewinds else {}),
            "data_wait_s": self.data_wait_s,
        }

    def _check_bad_steps(self, report: StepReport, reporter: Reporter, consumed: int) -> bool:
        """Tell of a bad step; after too many, go back.

        Returns:
            Whether the run went back to a checkpoint.

        Raises:
            BadNumbersError: too many, and the run may not go back.
        """
        if not report.skipped:
            return False
        state, limit = self.state, self.config.training.max_bad_steps
        reason = report.spike or self._bad_numbers(report)
        samples = [place_of(sample, state.left_out) for sample in (consumed, state.consumed_samples - 1)]
        reporter.skipped(state.step, reason, *samples)
        if report.overflow or state.bad_in_a_row < limit:
            return False
        if self.checkpointer.pending:
            self._finish_save(reporter)
        why = f"{limit} steps in a row had a non-finite loss or gradient or a spike (training.max_bad_steps)"
        if state.rewinds >= self.config.training.max_rewinds:
            gone_back = f" after {state.rewinds} rewinds (training.max_rewinds)" if state.rewinds else ""
            raise BadNumbersError(
                f"{why}{gone_back}, the last one step {state.step}; no checkpoint was written. Look at the losses in "
                f"{self.folder / 'metrics.jsonl'} and at {self.folder / 'skipped.jsonl'}; a lower optimizer.lr or a "
                "longer optimizer.lr_warmup_steps often helps"
            )
        self._go_back(why, reporter)
        return True

    def _bad_numbers(self, report: StepReport) -> str:
        scaler = self.optimizer.scaler
        if scaler is not None and report.overflow:
            return f"fp16 gradients overflow; the loss scale is {scaler.scale:g} now"
        if scaler is not None and report.finite_loss:
            field = "precision.loss_scale" if scaler.constant else "precision.min_loss_scale"
            return f"the gradient is not finite, and the loss scale cannot fall below {field}"
        return "the loss or the gradient is not finite"

    def _go_back(self, why: str, reporter: Reporter) -> None:
        """Return to the last good checkpoint, and go on without the data that were read since."""
        state, group = self.state, self.layout.cpu_group

        def find() -> Path:
            checkpoint = last_good_checkpoint(self.checkpointer.folder.folder)
            if checkpoint is None:
                raise BadNumbersError(
                    f"{why}, the last one step {state.step}, and there is no checkpoint to go back to "
                    "(training.max_rewinds); set checkpoint.save_interval lower, or optimizer.lr"
                )
            self.checkpointer.guard()
            go_back(self.folder, checkpoint, state, why)
            return checkpoint

        self.resume(on_first_rank(find, group))
        reporter.went_back(self.state, why)

    def _validation_due(self) -> bool:
        interval, step = self.config.training.eval_interval, self.state.step
        return step == self.plan.train_steps or (interval is not None and step % interval == 0)

    def _save_due(self) -> bool:
        interval, step = self.config.checkpoint.save_interval, self.state.step
        if self.config.training.max_rewinds and self.state.bad_in_a_row and step < self.plan.train_steps:
            return False  # retention could remove the checkpoint to go back to
        return step == self.plan.train_steps or (interval is not None and step % interval == 0)

    def _save(self, reporter: Reporter, background: bool = False) -> None:
        """Write a checkpoint, or begin to; one that is still being written is finished before."""
        if self.checkpointer.pending:
            self._finish_save(reporter)
        content = (self.stage, self.optimizer, self.state, dump_yaml(self.config))
        with phase(self.config.parallel, self.layout, self.config.parallel.save_timeout_s):
            if background:
                self.checkpointer.begin(*content)
                return
            self.last_saved = self.checkpointer.save(*content)
        reporter.saved(self.last_saved)

    def _finish_save(self, reporter: Reporter) -> None:
        """Make a checkpoint visible that was written in the background.

        Raises:
            CheckpointError: it could not be written, and checkpoint.async_failure is stop.
        """
        try:
            with phase(self.config.parallel, self.layout, self.config.parallel.save_timeout_s):
                self.last_saved = self.checkpointer.finish()
        except CheckpointError as error:
            if self.config.checkpoint.async_failure == "stop":
                raise
            reporter.say(f"warning: {error}")
            return
        reporter.saved(self.last_saved)


def _asked(stop: Optional[StopRequests]) -> str:
    """What made the run stop, as far as this rank knows."""
    asked = None if stop is None else stop.requested
    return "a signal" if asked is None or asked.startswith("SIG") else asked
