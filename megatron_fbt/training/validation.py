"""Validation loss of every pass, and under the recurrence of decoding (method section 7)."""

from typing import Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import Recipe, run_passes
from megatron_fbt.core.sequential import SequentialRecipe, score_answers
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.data.batch import BatchReader, load_micro_batches
from megatron_fbt.data.dataset import Rows
from megatron_fbt.data.sampler import micro_batch_sample_ids
from megatron_fbt.feedback.diagnostics import PassDiagnostics
from megatron_fbt.training.health import gains


class Validator:
    """Runs feedback.eval_passes passes, all positions fused but document starts, jitter and prefix mix-in off.

    Args:
        config: the whole configuration.
        layout: this process's place.
        stage: the model.
        rows: validation rows; None = no validation.
        eod: id of the end-of-document token.
        reader: this rank's part in reading.
        through: see run_passes.
    """

    def __init__(
        self,
        config: PretrainConfig,
        layout: Layout,
        stage: FBTStage,
        rows: Optional[Rows],
        eod: int,
        reader: BatchReader,
        through: Callable[[torch.nn.Module], torch.nn.Module] = lambda chunk: chunk,
    ):
        self.config, self.layout, self.stage = config, layout, stage
        self.rows, self.eod, self.reader, self.through = rows, eod, reader, through
        self.recipe = Recipe(config.feedback, config.run.seed, training=False)

    @torch.no_grad()
    def run(self, sequential: bool) -> Dict[str, float]:
        """Measure over training.eval_iters global batches, the same rows each time.

        Args:
            sequential: also under the recurrence of decoding (feedback.sequential_eval).

        Returns:
            validation_loss_pass_k, the mean NLL in nats; what PassDiagnostics gives, with `validation_` before it; and
            for the recurrence validation_loss_soft, validation_loss_soft_trained (SOFT's prompt and region with the
            trained number of passes), validation_loss_fused_n and validation_soft_update_norm (of the last pass: how
            far the passes are from the recurrence). Empty when validation is off.
        """
        if self.rows is None or self.config.training.eval_iters == 0:
            return {}
        self.stage.eval()
        feedback, prefix = self.config.feedback, "validation_"
        losses, health = self._measure(self.recipe, feedback.validation_passes)
        found = {f"{prefix}loss_pass_{k}": loss for k, loss in enumerate(losses, start=1)}
        found.update({prefix + name: value for name, value in {**gains(losses), **health}.items()})
        if sequential and feedback.sequential_passes > 0:
            found.update(self._sequential(feedback.sequential_passes))
        self.stage.train()
        return found

    def _sequential(self, passes: int) -> Dict[str, float]:
        feedback = self.config.feedback
        soft, health = self._measure(self._sequential_recipe(0, passes), passes)
        found = {
            "validation_loss_soft": soft[-1],
            "validation_loss_soft_trained": soft[min(feedback.max_passes, passes) - 1],
            "validation_soft_update_norm": health.get(f"update_norm_pass_{passes}", 0.0),
        }
        prompt_passes = feedback.sequential_eval.fused_passes
        if 0 < prompt_passes < passes:
            fused, _ = self._measure(self._sequential_recipe(prompt_passes, passes), passes)
            found[f"validation_loss_fused_{prompt_passes}"] = fused[-1]
        return found

    def _sequential_recipe(self, fused_passes: int, passes: int) -> SequentialRecipe:
        return SequentialRecipe(
            self.config.feedback,
            self.config.run.seed,
            training=False,
            fused_passes=fused_passes,
            last_pass=passes,
            first_row=self.layout.own_rows(self.config.data.sequence_length).start,
        )

    def _measure(self, recipe: Recipe, passes: int) -> Tuple[List[float], Dict[str, float]]:
        """Mean NLL of each pass, and the diagnostics."""
        training, layout = self.config.training, self.layout
        sums = torch.zeros(passes + 1, dtype=torch.float64, device=layout.device)
        diagnostics = PassDiagnostics(passes, layout)
        unmarked = isinstance(recipe, SequentialRecipe) and self.config.data.format == "indexed"
        for iteration in range(training.eval_iters):
            ids = micro_batch_sample_ids(
                iteration * training.global_batch_size,
                training.global_batch_size,
                training.micro_batch_size,
                layout.data_rank,
                layout.data_size,
            )
            batches = load_micro_batches(self.rows, ids, self.eod, self.reader)
            batches = score_answers(batches) if unmarked else batches
            totals = run_passes(
                self.stage, batches, passes, recipe, True, diagnostics=diagnostics, through=self.through
            )
            if layout.is_last_stage and layout.tensor_rank == 0:
                sums[0] += totals.tokens
                sums[1:] += totals.nll
        dist.all_reduce(sums)
        tokens, *losses = sums.tolist()
        return [loss / max(tokens, 1.0) for loss in losses], diagnostics.reduce()
