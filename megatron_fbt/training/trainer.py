"""The training loop: batches in, optimizer steps, reports and checkpoints out."""

import dataclasses
import time
from pathlib import Path
from typing import Dict, Optional, Tuple

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.plan import RunPlan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.grad_sync import wrap_for_data_parallel
from megatron_fbt.core.parallel import Layout, seed_dropout
from megatron_fbt.core.schedule import Recipe, run_passes
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.data.batch import BatchReader, load_micro_batches
from megatron_fbt.data.dataset import Datasets
from megatron_fbt.data.sampler import micro_batch_sample_ids
from megatron_fbt.errors import BadNumbersError, StoppedBySignal
from megatron_fbt.feedback.diagnostics import PassDiagnostics
from megatron_fbt.feedback.pass_schedule import passes_at
from megatron_fbt.training.batch_size import BatchSizeSchedule
from megatron_fbt.training.checkpoint import Checkpointer
from megatron_fbt.training.health import gains
from megatron_fbt.training.lr_schedule import LearningRate
from megatron_fbt.training.optimizer import Optimizer, StepReport, total_loss
from megatron_fbt.training.reporter import Reporter
from megatron_fbt.training.run_folder import TrainerState, checkpoints_folder, step_folder
from megatron_fbt.training.signals import SignalWatcher
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

    def __init__(self, config: PretrainConfig, plan: RunPlan, layout: Layout, datasets: Datasets, eod: int):
        self.config, self.plan, self.layout, self.datasets, self.eod = config, plan, layout, datasets, eod
        self.stage = FBTStage(config, layout, plan.vocab_size, plan.padded_vocab_size)
        self.model = wrap_for_data_parallel(self.stage, config.optimizer.sharding, config.parallel.overlap_grad_reduce)
        self.optimizer = Optimizer(config.optimizer, self.model, layout)
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
        self.recipe = Recipe(config.feedback, config.run.seed, training=True)
        self.validator = Validator(config, layout, self.stage, datasets.valid, eod, self.reader)
        self.folder = Path(config.run.dir)
        self.checkpointer = Checkpointer(checkpoints_folder(config), config.checkpoint, layout)
        self.state = TrainerState(phase_start_steps=list(plan.phase_start_steps))
        self.last_saved: Optional[Path] = None

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        self.state = self.checkpointer.load(checkpoint, self.stage, self.optimizer)
        self.state.phase_start_steps = list(self.plan.phase_start_steps)
        self.last_saved = checkpoint

    def train(self, reporter: Reporter, signals: SignalWatcher) -> None:
        """Run to the end of the plan.

        Raises:
            StoppedBySignal: a rank was asked to stop; a checkpoint was written.
            BadNumbersError: training.max_bad_steps steps in a row were not finite; none was written.
        """
        while self.state.step < self.plan.train_steps:
            began, consumed = time.perf_counter(), self.state.consumed_samples
            row, report = self._step(signals)
            seconds = time.perf_counter() - began
            if self._validation_due():
                row.update(self.validator.run(sequential=self.state.fusion_active))
            tokens = (self.state.consumed_samples - consumed) * self.plan.sequence_length
            reporter.step(row, tokens, seconds, self.state)
            self._check_bad_steps(report)
            stop = report.stop_requested and self.state.step < self.plan.train_steps
            if stop or self._save_due():
                self._save(reporter)
            if stop:
                raise StoppedBySignal(
                    f"stopped by a signal after step {self.state.step}; {self.last_saved} was written: "
                    "the same command resumes from it"
                )
        if self.last_saved is None or self.last_saved.name != step_folder(self.state.step):
            self._save(reporter)

    def _step(self, signals: SignalWatcher) -> Tuple[Dict, StepReport]:
        """One global batch: its row for the logs, and what the optimizer did."""
        config, state = self.config, self.state
        passes = passes_at(state.step, config.run.seed, self.plan.phase_start_steps, config.feedback.phases)
        if passes > 1 and state.switch_on_step is None:
            state.switch_on_step = state.step
        if config.model.attention_dropout or config.model.hidden_dropout:
            seed_dropout(config.run.seed, state.step)
        lr = self.learning_rate.apply(self.optimizer, state.consumed_samples)
        diagnostics = PassDiagnostics(passes, self.layout) if self._diagnostics_due() else None
        self.stage.train()
        self.optimizer.zero_grad()
        totals = run_passes(
            self.stage,
            self._micro_batches(),
            passes,
            self._recipe(),
            on_last_backward=self.optimizer.on_last_backward,
            diagnostics=diagnostics,
        )
        report = self.optimizer.step(totals, state.fusion_active, signals.requested is not None)
        self._count(passes, report)
        row = self._row(passes, lr, report)
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
        return dataclasses.replace(self.recipe, extra_factor=factor, z_loss=z_loss)

    def _micro_batches(self):
        consumed, layout = self.state.consumed_samples, self.layout
        ids = micro_batch_sample_ids(
            consumed,
            self.batch_sizes.global_batch_size(consumed),
            self.config.training.micro_batch_size,
            layout.data_rank,
            layout.data_size,
        )
        return load_micro_batches(self.datasets.train, ids, self.eod, self.reader)

    def _count(self, passes: int, report: StepReport) -> None:
        state = self.state
        rows = self.batch_sizes.global_batch_size(state.consumed_samples)
        state.step += 1
        state.consumed_samples += rows
        state.token_equivalents += rows * self.plan.sequence_length * passes
        state.count_passes(passes)
        state.updates, state.fusion_updates = self.optimizer.updates, self.optimizer.fusion_updates
        state.skipped += int(report.skipped)
        state.bad_in_a_row = state.bad_in_a_row + 1 if report.skipped else 0

    def _row(self, passes: int, lr: float, report: StepReport) -> Dict:
        losses = {f"loss_pass_{k}": loss for k, loss in enumerate(report.loss_per_pass, start=1)}
        weights = self.config.feedback.loss_weights
        factor = weights.extra_factor(self.state.step - 1, self.state.switch_on_step)
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
            "tokens": self.state.consumed_samples * self.plan.sequence_length,
            "token_equivalents": self.state.token_equivalents,
            **{f"pass_share_{passes}": share for passes, share in self.state.pass_shares.items()},
            "loss_tokens": report.loss_tokens,
            "skipped": self.state.skipped,
        }

    def _check_bad_steps(self, report: StepReport) -> None:
        limit = self.config.training.max_bad_steps
        if report.skipped and self.state.bad_in_a_row >= limit:
            raise BadNumbersError(
                f"{limit} steps in a row had a non-finite loss or gradient (training.max_bad_steps), the last one step "
                f"{self.state.step}; no checkpoint was written. Look at the losses in {self.folder / 'metrics.jsonl'}; "
                "a lower optimizer.lr or a longer optimizer.lr_warmup_steps often helps"
            )

    def _validation_due(self) -> bool:
        interval, step = self.config.training.eval_interval, self.state.step
        return step == self.plan.train_steps or (interval is not None and step % interval == 0)

    def _save_due(self) -> bool:
        interval, step = self.config.checkpoint.save_interval, self.state.step
        return step == self.plan.train_steps or (interval is not None and step % interval == 0)

    def _save(self, reporter: Reporter) -> None:
        self.last_saved = self.checkpointer.save(self.stage, self.optimizer, self.state, dump_yaml(self.config))
        reporter.saved(self.last_saved)
