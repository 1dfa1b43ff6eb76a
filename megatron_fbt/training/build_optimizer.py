"""The optimizer that a configuration asks for."""

from typing import Optional

from megatron_fbt.config.deepspeed import ZERO_STAGES, deepspeed_settings
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.grad_sync import wrap_for_data_parallel
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.training.buffer_optimizer import BufferOptimizer
from megatron_fbt.training.loss_scaler import LossScaler
from megatron_fbt.training.optimizer import Optimizer


def build_optimizer(
    config: PretrainConfig, stage: FBTStage, layout: Layout, bucket_size: Optional[int] = None
) -> Optimizer:
    """Wrap a stage for data-parallel training and give it an optimizer.

    Args:
        config: validated.
        stage: the model, with its initial weights.
        layout: this process's place.
        bucket_size: see wrap_for_data_parallel.
    """
    if config.optimizer.sharding in ZERO_STAGES:
        from megatron_fbt.training.zero_optimizer import ZeroOptimizer

        return ZeroOptimizer(config.optimizer, deepspeed_settings(config, layout.data_size), stage, layout)
    overlap = config.parallel.overlap_grad_reduce
    model = wrap_for_data_parallel(stage, config.optimizer.sharding, overlap, bucket_size)
    scaler = LossScaler(config.precision) if config.precision.dtype == "fp16" else None
    return BufferOptimizer(config.optimizer, model, layout, scaler)
