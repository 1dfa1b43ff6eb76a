"""What rank 0 of a run writes: console, metrics.jsonl, status.json, TensorBoard."""

import dataclasses
import json
from pathlib import Path
from typing import Callable, Dict, Optional, Sequence

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.memory_report import rank_memory
from megatron_fbt.config.parameter_count import stage_parameters
from megatron_fbt.config.plan import RunPlan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.data_plan import FILE as DATA_PLAN
from megatron_fbt.data.data_plan import DataPlan
from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.console import TimeLeft, console_line
from megatron_fbt.training.flops import step_flops
from megatron_fbt.training.health import warnings
from megatron_fbt.training.leftovers import remove_drafts
from megatron_fbt.training.metrics import MetricsLog, read_metrics, replace_file
from megatron_fbt.training.optimizer import HeldBytes
from megatron_fbt.training.rewind import REWINDS
from megatron_fbt.training.run_folder import CONFIG_FILE, TrainerState, step_folder
from megatron_fbt.training.status import known_status, write_status
from megatron_fbt.training.tensorboard_log import TensorBoardLog

LENGTH_FIELDS = ("training.train_", "training.global_batch_size", "training.rampup_batch_size", "data.sequence_length")
"""What the length of a run in steps follows from."""


class Reporter:
    """Reports of one run; does nothing on ranks other than 0.

    Args:
        config: the whole configuration.
        plan: derived quantities.
        active: whether this rank reports.
    """

    def __init__(self, config: PretrainConfig, plan: RunPlan, active: bool):
        self.config, self.plan, self.active = config, plan, active
        self.folder = Path(config.run.dir)
        self.time_left = TimeLeft()
        self.state = TrainerState()
        self.last_row: Dict = {}
        self.last_checkpoint: Optional[str] = None
        self.metrics: Optional[MetricsLog] = None
        self.skips = MetricsLog(self.folder / "skipped.jsonl")
        self.tensorboard: Optional[TensorBoardLog] = None
        self._memory_said = False
        self._full_said = False

    def say(self, message: str) -> None:
        """One line for the user."""
        if self.active:
            print(message, flush=True)

    def starting(self, message: str) -> None:
        """The run's processes have found each other."""
        self.say(message)
        self.status("running")

    def data(self, plan: Optional[DataPlan]) -> None:
        """Tell and store what the run reads of each source."""
        if not self.active or plan is None:
            return
        self.say(plan.describe())
        replace_file(self.folder / DATA_PLAN, json.dumps(plan.as_dict(), indent=2) + "\n")

    def resuming(self, checkpoint: Path, state: TrainerState, changes: Sequence[str]) -> None:
        """Say from where the run goes on, and with which other settings than before."""
        self.state, self.last_checkpoint = state, checkpoint.name
        self.say(f"resuming from {checkpoint} (step {state.step})")
        if changes:
            self.say("changed since then: " + "; ".join(changes))
        if any(change.startswith(LENGTH_FIELDS) for change in changes):
            self.say(
                "the run has another length: from here on the learning rate and the order of the data are those of a "
                "run of this length"
            )
        self._say_phases(state)
        if state.pass_counts:
            self.say(state.describe_passes())

    def _say_phases(self, state: TrainerState) -> None:
        """Where phases start, if that is neither as stored nor as in a new run; the plan has what holds."""
        used = list(self.plan.phase_start_steps)
        anew = self.config.feedback.phase_start_steps(self.plan.train_steps)
        steps = ", ".join(f"{step:,}" for step in used)
        if used != anew:
            new = ", ".join(f"{step:,}" for step in anew)
            self.say(f"the phases of feedback.schedule start at steps {steps}, as stored; a new run has {new}")
        elif state.phase_start_steps and used != state.phase_start_steps:
            self.say(f"feedback.schedule has changed: its phases start at steps {steps} of this run's length")

    def begin(self, state: TrainerState) -> None:
        """Open the logs at the step from which the run goes on, and store the configuration that it runs with."""
        self.state = state
        self.say(f"training from step {state.step + 1} to {self.plan.train_steps}")
        if not self.active:
            return
        remove_drafts(self.folder)
        replace_file(self.folder / CONFIG_FILE, dump_yaml(self.config))
        if state.step == 0 and not state.rewinds:
            (self.folder / REWINDS).unlink(missing_ok=True)
        self._open_logs(state)

    def _open_logs(self, state: TrainerState) -> None:
        """Begin or go on with the logs behind a step."""
        self.state = state
        if self.metrics is not None:
            self.metrics.close()
        self.metrics = MetricsLog(self.folder / "metrics.jsonl")
        self.metrics.cut_after(state.step)
        self.tensorboard = TensorBoardLog(
            self.folder / "tensorboard", self.config.logging.tensorboard, first_step=state.step + 1
        )
        rows = read_metrics(self.folder / "metrics.jsonl")
        self.last_row = rows[-1] if rows else {}
        self.status("running")

    def step(self, row: Dict, tokens: int, seconds: float, state: TrainerState) -> None:
        """Report one executed step.

        Args:
            row: what it did.
            tokens: of its global batch, each once.
            seconds: its duration, without validation.
            state: after the step.
        """
        self.state = state
        if not self.active:
            return
        row["seconds"] = seconds
        row["data_wait_share"] = row["data_wait_s"] / seconds
        row["tokens_per_second"] = tokens / seconds
        flops = step_flops(self.config.model, self.plan.sequence_length, self.plan.vocab_size, tokens, row["passes"])
        row["model_tflops"] = flops / seconds / 1e12
        self.time_left.add_step(seconds, tokens, row["passes"])
        self.last_row = row
        eta = self._eta(state)
        self._write(lambda: self.metrics.append(row))
        self._write(lambda: self.tensorboard.log_row(row))
        self._write(lambda: self.status("running", eta))
        last = row["step"] == self.plan.train_steps
        if row["step"] % self.config.logging.log_interval == 0 or last or "validation_loss_pass_1" in row:
            print(console_line(row, self.plan.train_steps, eta), flush=True)
        for warning in warnings(row, self.config.feedback):
            print(f"warning: {warning}", flush=True)

    def _write(self, action: Callable[[], None]) -> None:
        """Do without a file for now that cannot be written: training may go on until the next checkpoint."""
        try:
            action()
        except OSError as error:
            if not self._full_said:
                self.say(f"warning: {error}; rows of metrics.jsonl wait, at the latest until the next checkpoint")
            self._full_said = True

    def flush(self) -> None:
        """Write the rows of metrics.jsonl that wait for space; a checkpoint is not to be ahead of them.

        Raises:
            CheckpointError: there is still none.
        """
        if not self.active or self.metrics is None:
            return
        try:
            self.metrics.flush()
            self.skips.flush()
        except OSError as error:
            raise CheckpointError(
                f"cannot write the rows before a checkpoint: {error}; free space and resume"
            ) from error
        self._full_said = False

    def memory(self, measure: Callable[[], HeldBytes]) -> None:
        """Say once what this process holds, and what it is expected to; a sleeping fusion layer has no moments yet."""
        if not self.active or self._memory_said:
            return
        self._memory_said = True
        config, held = self.config, measure()
        stage = stage_parameters(config.model, config.parallel, self.plan.vocab_size)[0]
        expected = rank_memory(
            config, 0, stage, config.optimizer.sharding, self.plan.data_parallel_size, self.plan.vocab_size
        )
        parts = [
            f"{name.replace('_', ' ')} {bytes_held / 2**20:,.1f} MiB (expected {getattr(expected, name) / 2**20:,.1f})"
            for name, bytes_held in dataclasses.asdict(held).items()
        ]
        self.say("memory of this process: " + ", ".join(parts))

    def skipped(self, step: int, reason: str, first_sample: int, last_sample: int) -> None:
        """Note a step that updated nothing, with the sample numbers of its global batch."""
        if not self.active:
            return
        print(f"warning: step {step} is skipped (samples {first_sample} to {last_sample}): {reason}", flush=True)
        row = {"step": step, "first_sample": first_sample, "last_sample": last_sample, "reason": reason}
        self._write(lambda: self.skips.append(row))

    def went_back(self, state: TrainerState, why: str) -> None:
        """Note a return to an older checkpoint; the logs go on from its step."""
        first, last = state.left_out[-1]
        self.say(
            f"warning: {why}; rewind {state.rewinds} goes back to step {state.step} and leaves out samples {first} to "
            f"{last - 1}"
        )
        self.last_checkpoint = step_folder(state.step)
        if self.active:
            self.tensorboard.close()
            self._open_logs(state)

    def saved(self, checkpoint: Path) -> None:
        """Note the newest checkpoint."""
        self.last_checkpoint = checkpoint.name
        self.say(f"saved {checkpoint}")

    def status(self, run_state: str, eta_s: Optional[float] = None) -> None:
        """Write status.json."""
        if not self.active:
            return
        path = self.folder / "status.json"
        reached = {
            "step": self.state.step,
            "loss": self.last_row.get("loss"),
            "tokens": self.state.consumed_samples * self.plan.sequence_length,
            "last_checkpoint": self.last_checkpoint,
        }
        if self.metrics is None:  # the run has not begun to go on: what is known of it still holds
            reached.update(known_status(path))
        write_status(path, state=run_state, train_steps=self.plan.train_steps, eta_s=eta_s, **reached)

    def end(self, run_state: str) -> None:
        """Write how the run ended ("finished", "stopped" or "failed") and close the logs."""
        self.status(run_state)
        if run_state == "finished" and self.state.pass_counts:
            self.say(self.state.describe_passes())
        self.skips.close()
        if self.metrics is not None:
            self.metrics.close()
        if self.tensorboard is not None:
            self.tensorboard.close()

    def _eta(self, state: TrainerState) -> Optional[float]:
        remaining = self.plan.token_equivalents * (1 - state.step / self.plan.train_steps)
        expected = self.plan.token_equivalents - state.token_equivalents
        return self.time_left.seconds(max(expected, 0.0) if expected > 0 else remaining)
