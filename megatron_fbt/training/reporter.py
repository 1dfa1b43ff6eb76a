"""What rank 0 of a run writes: console, metrics.jsonl, status.json, TensorBoard."""

from pathlib import Path
from typing import Dict, Optional

from megatron_fbt.config.plan import RunPlan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.training.checkpoint import TrainerState
from megatron_fbt.training.console import TimeLeft, console_line
from megatron_fbt.training.flops import step_flops
from megatron_fbt.training.metrics import MetricsLog
from megatron_fbt.training.status import write_status
from megatron_fbt.training.tensorboard_log import TensorBoardLog


class Reporter:
    """Reports of one run; does nothing on ranks other than 0.

    Args:
        config: the whole configuration.
        plan: derived quantities.
        first_step: step that the run (re)starts from.
        active: whether this rank reports.
    """

    def __init__(self, config: PretrainConfig, plan: RunPlan, first_step: int, active: bool):
        self.config, self.plan, self.active = config, plan, active
        self.folder = Path(config.run.dir)
        self.time_left = TimeLeft()
        self.previous_tokens = 0
        self.last_row: Dict = {}
        self.last_checkpoint: Optional[str] = None
        if active:
            self.metrics = MetricsLog(self.folder / "metrics.jsonl")
            self.metrics.cut_after(first_step)
            self.tensorboard = TensorBoardLog(
                self.folder / "tensorboard", config.logging.tensorboard, first_step=first_step + 1
            )

    def step(self, row: Dict, seconds: float, state: TrainerState) -> None:
        """Report one executed step that took so many seconds."""
        if not self.active:
            return
        tokens = row["tokens"] - self.previous_tokens
        self.previous_tokens = row["tokens"]
        row["seconds"] = seconds
        row["tokens_per_second"] = tokens / seconds
        flops = step_flops(self.config.model, self.plan.sequence_length, self.plan.vocab_size, tokens, row["passes"])
        row["model_tflops"] = flops / seconds / 1e12
        self.metrics.append(row)
        self.tensorboard.log_row(row)
        self.time_left.add_step(seconds, tokens, row["passes"])
        self.last_row = row
        eta = self._eta(state)
        self.status("running", eta)
        last = row["step"] == self.plan.train_steps
        if row["step"] % self.config.logging.log_interval == 0 or last or "validation_loss_pass_1" in row:
            print(console_line(row, self.plan.train_steps, eta), flush=True)

    def resumed(self, state: TrainerState, checkpoint: Path) -> None:
        """Say from where the run goes on."""
        self.previous_tokens = state.consumed_samples * self.plan.sequence_length
        self.last_checkpoint = checkpoint.name
        if self.active:
            print(f"resuming from {checkpoint} (step {state.step})", flush=True)

    def saved(self, checkpoint: Path) -> None:
        """Note the newest checkpoint."""
        self.last_checkpoint = checkpoint.name
        if self.active:
            print(f"saved {checkpoint}", flush=True)

    def status(self, run_state: str, eta_s: Optional[float] = None) -> None:
        """Write status.json."""
        if not self.active:
            return
        write_status(
            self.folder / "status.json",
            state=run_state,
            step=self.last_row.get("step"),
            train_steps=self.plan.train_steps,
            loss=self.last_row.get("loss"),
            eta_s=eta_s,
            tokens=self.last_row.get("tokens"),
            last_checkpoint=self.last_checkpoint,
        )

    def close(self) -> None:
        """Close the logs."""
        if self.active:
            self.metrics.close()
            self.tensorboard.close()

    def _eta(self, state: TrainerState) -> Optional[float]:
        remaining = self.plan.token_equivalents * (1 - state.step / self.plan.train_steps)
        expected = self.plan.token_equivalents - state.token_equivalents
        return self.time_left.seconds(max(expected, 0.0) if expected > 0 else remaining)
