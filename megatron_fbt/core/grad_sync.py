"""Gradient buffers, their reduction over ranks, and Megatron-Core's optimizer over them."""

from typing import List, Optional

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_fbt.config.optimizer import OptimizerConfig
from megatron_fbt.core.cpu import cuda_type_names
from megatron_fbt.core.muon import hidden_matrices, install_muon, muon_group
from megatron_fbt.core.stage import FBTStage

FUSION_GROUP = "fusion"
"""Key that marks the fusion layer's parameter group, which starts dormant."""


def wrap_for_data_parallel(
    stage: FBTStage, sharding: str, overlap: bool = False, bucket_size: Optional[int] = None
) -> DistributedDataParallel:
    """Give the stage's parameters fp32 gradient buffers that are summed (not averaged) over data-parallel ranks.

    Args:
        stage: this rank's stage; the K pass views run it directly, so the gradients of all passes add up here.
        sharding: optimizer.sharding.
        overlap: parallel.overlap_grad_reduce.
        bucket_size: parameters reduced together when overlapping; None = Megatron-Core's choice.
    """
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=sharding == "megatron",
        bucket_size=bucket_size,
        fp8_param_gather=stage.config.fp8_param,
        reuse_grad_buf_for_mxfp8_param_ag=_gathers_through_gradients(stage),
    )
    model = DistributedDataParallel(stage.config, options, stage)
    for group in model.bucket_groups:
        # Megatron-Core would count in the first batch how often a parameter's gradient arrives, and a batch with
        # another number of passes would then reduce too early or never. Armed for the last backward alone, it is once.
        group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)
        group.is_first_batch = False
    return model


def _gathers_through_gradients(stage: FBTStage) -> bool:
    """Weights in mxfp8 cannot lie in a buffer: Megatron-Core gathers them in bf16, in the memory of their gradients."""
    return stage.config.fp8_param and stage.config.fp8_recipe == "mxfp8"


def disarm_reduction(model: DistributedDataParallel) -> None:
    """Let gradients add up without being reduced; to be called before the first backward of a step."""
    for group in model.bucket_groups:
        group.is_last_microbatch = False


def arm_reduction(model: DistributedDataParallel) -> None:
    """Reduce each bucket as soon as its gradients arrive; to be called when the last backward of a step begins."""
    for group in model.bucket_groups:
        group.is_last_microbatch = True
    for param in model.module.weights_of_forward():
        model.param_to_bucket_group[param].register_grad_ready(param)


def reduce_gradients(model: DistributedDataParallel) -> None:
    """Sum gradients over data-parallel ranks, sequence shards (norms) and the two copies of a tied embedding."""
    if model.ddp_config.overlap_grad_reduce:
        for group in model.bucket_groups:
            # The last backward is that of pass 1, which has no gradient for the fusion layer.
            if group.grad_reduce_handle is None:
                group.start_grad_sync()
    finalize_model_grads([model])


def build_megatron_optimizer(config: OptimizerConfig, model: DistributedDataParallel) -> MegatronOptimizer:
    """AdamW over the model's gradient buffers, with optimizer.type muon under Muon for the hidden matrices.

    No weight decay on vectors; the fusion layer in a group of its own.

    Raises:
        ConfigError: Muon is asked for and torch has none.
    """
    stage: FBTStage = model.module
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=stage.config.bf16,
        fp16=stage.config.fp16,
        params_dtype=stage.config.params_dtype,
        use_distributed_optimizer=config.sharding == "megatron",
        fp8_recipe=stage.config.fp8_recipe if stage.config.fp8_param else None,
        reuse_grad_buf_for_mxfp8_param_ag=_gathers_through_gradients(stage),
    )
    overrides = {
        ParamKey(predicate=ParamPredicate(name="vector", fn=lambda param: param.dim() == 1)): {"wd_mult": 0.0},
        ParamKey(name="*fusion.*"): {FUSION_GROUP: True},
    }
    if config.type == "muon":
        named = dict(stage.named_parameters())
        matrices = {id(named[name]) for name in hidden_matrices(stage)}
        key = ParamKey(predicate=ParamPredicate(name="matrix", fn=lambda param: id(param) in matrices))
        overrides[key] = muon_group(config)
    with cuda_type_names():
        chained = get_megatron_optimizer(options, [model], config_overrides=overrides, use_gloo_process_groups=False)
    (optimizer,) = chained.chained_optimizers
    optimizer.grad_scaler = None  # gradients are scaled back together with their division by the tokens
    if config.type == "muon":
        install_muon(config, stage, optimizer)
    return optimizer


def main_gradients(optimizer: MegatronOptimizer) -> List[torch.Tensor]:
    """The fp32 gradients that the optimizer steps with, after prepare_grads."""
    return [param.grad for param in optimizer.get_parameters() if param.grad is not None]


def norm_weights(optimizer: MegatronOptimizer) -> List[float]:
    """For each of main_gradients: 1 if it counts towards the global norm, 0 if another rank counts its copy of it."""
    return [
        float(param_is_not_shared(param) and tensor_parallel.param_is_not_tensor_parallel_duplicate(param))
        for param in optimizer.get_parameters()
        if param.grad is not None
    ]
