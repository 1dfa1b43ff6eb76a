"""Validation loss of every pass (method section 7)."""

from typing import Dict, Optional

import torch
import torch.distributed as dist

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import Recipe, run_passes
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.data.batch import BatchReader, load_micro_batches
from megatron_fbt.data.dataset import Rows
from megatron_fbt.data.sampler import micro_batch_sample_ids


class Validator:
    """Runs feedback.eval_passes passes, all positions fused but document starts, jitter and prefix mix-in off.

    Args:
        config: the whole configuration.
        layout: this process's place.
        stage: the model.
        rows: validation rows; None = no validation.
        eod: id of the end-of-document token.
        reader: this rank's part in reading.
    """

    def __init__(
        self,
        config: PretrainConfig,
        layout: Layout,
        stage: FBTStage,
        rows: Optional[Rows],
        eod: int,
        reader: BatchReader,
    ):
        self.config, self.layout, self.stage = config, layout, stage
        self.rows, self.eod, self.reader = rows, eod, reader
        self.recipe = Recipe(config.feedback, config.run.seed, training=False)

    @torch.no_grad()
    def run(self) -> Dict[str, float]:
        """Mean NLL per pass over training.eval_iters global batches, the same rows each time.

        Returns:
            {"validation_loss_pass_1": nats, ...}; empty when validation is off.
        """
        training, layout = self.config.training, self.layout
        if self.rows is None or training.eval_iters == 0:
            return {}
        self.stage.eval()
        passes = self.config.feedback.validation_passes
        sums = torch.zeros(passes + 1, dtype=torch.float64, device=layout.device)
        for iteration in range(training.eval_iters):
            ids = micro_batch_sample_ids(
                iteration * training.global_batch_size,
                training.global_batch_size,
                training.micro_batch_size,
                layout.data_rank,
                layout.data_size,
            )
            micro_batches = load_micro_batches(self.rows, ids, self.eod, self.reader)
            totals = run_passes(self.stage, micro_batches, passes, self.recipe, forward_only=True)
            if layout.is_last_stage and layout.tensor_rank == 0:
                sums[0] += totals.tokens
                sums[1:] += totals.nll
        self.stage.train()
        dist.all_reduce(sums)
        tokens, *losses = sums.tolist()
        return {f"validation_loss_pass_{k}": loss / max(tokens, 1.0) for k, loss in enumerate(losses, start=1)}
