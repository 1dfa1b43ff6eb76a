"""DeepSpeed's ZeRO around a stage: its engine runs the passes, reduces and shards; Megatron-Core's groups stay.

The engine owns reduction over data-parallel ranks, the global norm, master weights and their shards. DeepSpeed does not
sum the gradients of norms under sequence parallelism or of a tied embedding's two copies: that happens here.
"""

import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.module import MegatronModule

from megatron_fbt.config.optimizer import OptimizerConfig
from megatron_fbt.core.cpu import on_gpu
from megatron_fbt.core.grad_sync import FUSION_GROUP
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.optional import import_deepspeed


class MegatronGroups:
    """Megatron-Core's process groups by the names that DeepSpeed asks for; "model parallel" is tensor x pipeline."""

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """All ranks that hold one copy of the model."""
        return parallel_state.get_model_parallel_group()

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self.get_model_parallel_group().size()

    def get_model_parallel_rank(self) -> int:
        """This rank among them."""
        return self.get_model_parallel_group().rank()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that share each layer."""
        return parallel_state.get_tensor_model_parallel_group()

    def get_tensor_model_parallel_world_size(self) -> int:
        """Their number."""
        return parallel_state.get_tensor_model_parallel_world_size()

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank among them."""
        return parallel_state.get_tensor_model_parallel_rank()

    def get_tensor_model_parallel_src_rank(self) -> int:
        """The first of them, as a global rank."""
        return parallel_state.get_tensor_model_parallel_src_rank()

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        """Stages of one copy of the model."""
        return parallel_state.get_pipeline_model_parallel_group()

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Their number."""
        return parallel_state.get_pipeline_model_parallel_world_size()

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's stage."""
        return parallel_state.get_pipeline_model_parallel_rank()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the model."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return parallel_state.get_data_parallel_world_size(with_context_parallel=True)

    def get_data_parallel_rank(self) -> int:
        """This rank among them."""
        return parallel_state.get_data_parallel_rank(with_context_parallel=True)

    def get_data_parallel_group_ranks(self) -> List[int]:
        """Them, as global ranks."""
        return dist.get_process_group_ranks(self.get_data_parallel_group())


class GatedAdamW(torch.optim.AdamW):
    """AdamW that DeepSpeed calls once for each shard, and that asks before the first of a step what to do.

    `decide` returns the factor for all gradients of the step, or None to change nothing.
    """

    decide: Callable[[], Optional[float]]
    fusion_active = True
    """Whether the fusion layer is stepped."""
    fusion_idle = False
    """Whether it has no gradient in this step: DeepSpeed, where it keeps buffers, would give the last one again."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the parameters of param_groups that have gradients; DeepSpeed does not pass a closure."""
        factor = self.decide()
        groups = self.param_groups
        if factor is None:
            return
        self.param_groups = [group for group in groups if self.fusion_active or not group.get(FUSION_GROUP)]
        for group in self.param_groups:
            gradients = [param.grad for param in group["params"] if param.grad is not None]
            if gradients and self.fusion_idle and group[FUSION_GROUP]:
                torch._foreach_zero_(gradients)
            elif gradients:
                torch._foreach_mul_(gradients, factor)
        super().step()
        self.param_groups = groups


class Passes(torch.nn.Module):
    """What the engine wraps: it calls whatever runs the passes over the stage, so that ZeRO sees one forward.

    Args:
        stage: owner of all parameters.
    """

    def __init__(self, stage: FBTStage):
        super().__init__()
        self.stage = stage

    def forward(self, chunk: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Run chunk (a PassView or UnrolledPasses) on a micro-batch."""
        return chunk(batch)


class ThroughEngine(torch.nn.Module):
    """A chunk as Megatron-Core's schedules call it, run by the engine."""

    def __init__(self, engine: Any, chunk: torch.nn.Module):
        super().__init__()
        object.__setattr__(self, "engine", engine)
        object.__setattr__(self, "chunk", chunk)
        self.config, self.model_type = chunk.config, chunk.model_type
        if hasattr(chunk, "vp_stage"):
            self.vp_stage = chunk.vp_stage

    def set_input_tensor(self, tensors: Any) -> None:
        """Hand on what the previous stage has sent."""
        self.chunk.set_input_tensor(tensors)

    def forward(self, batch: Any) -> torch.Tensor:
        """See Passes."""
        return self.engine(self.chunk, batch)


class _Unreduced(MegatronModule):
    """The stage in the shape that finalize_model_grads expects, with nothing to reduce over data-parallel ranks."""

    def __init__(self, stage: FBTStage):
        super().__init__(config=stage.config)
        self.module = stage
        self.ddp_config = DistributedDataParallelConfig()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """DeepSpeed reduces."""


def parameter_groups(config: OptimizerConfig, stage: FBTStage) -> List[Dict[str, Any]]:
    """Matrices, vectors (no weight decay) and the fusion layer's matrices, with what a learning-rate schedule reads.

    A stage without a fusion layer has a matrix in a group of its own instead: DeepSpeed reduces a norm over all stages
    for each group, so each needs as many.
    """
    sorted_params: Dict[Tuple[float, bool], List[torch.nn.Parameter]] = {}
    for name, param in stage.named_parameters():
        key = (0.0 if param.dim() == 1 else 1.0, name.startswith("fusion."))
        sorted_params.setdefault(key, []).append(param)
    groups = [(wd_mult, fusion, params) for (wd_mult, fusion), params in sorted_params.items()]
    if not stage.pre_process:
        groups.append((1.0, False, [sorted_params[1.0, False].pop()]))
    return [
        {"params": params, "wd_mult": wd_mult, "weight_decay": config.weight_decay * wd_mult, FUSION_GROUP: fusion}
        for wd_mult, fusion, params in groups
    ]


def _is_summed_over_tensor_ranks(stage: FBTStage, name: str, param: torch.nn.Parameter) -> bool:
    """Whether tensor-parallel ranks see different parts of what a replicated parameter's gradient is made of."""
    config = stage.config
    per_head = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
    return per_head or (config.sequence_parallel and getattr(param, "sequence_parallel", False))


def _sum_in_backward(stage: FBTStage) -> None:
    """Sum such gradients as they arrive, for the stages of ZeRO that give them away during the backward."""
    group = parallel_state.get_tensor_model_parallel_group()

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    if group.size() > 1:
        for name, param in stage.named_parameters():
            if _is_summed_over_tensor_ranks(stage, name, param):
                param.register_hook(summed)


class ZeroEngine:
    """DeepSpeed's engine over a stage.

    Args:
        config: optimizer section.
        settings: DeepSpeed's configuration.
        stage: the model; with zero3 its parameters are sharded from here on.
    """

    def __init__(self, config: OptimizerConfig, settings: Dict[str, Any], stage: FBTStage):
        self.stage, self.partitions_gradients = stage, config.sharding != "zero1"
        deepspeed = import_deepspeed()
        deepspeed.init_distributed("nccl" if on_gpu() else "gloo", verbose=False)
        if stage.share_embeddings_and_output_weights and stage.post_process and not stage.pre_process:
            stage.output_layer.weight.ds_pipe_replicated = True  # the norm counts the first stage's copy
        if self.partitions_gradients:
            _sum_in_backward(stage)
        self.adamw = GatedAdamW(
            parameter_groups(config, stage),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=Passes(stage), optimizer=self.adamw, config=settings, mpu=MegatronGroups()
        )
        self._unreduced = _Unreduced(stage)

    def through(self, chunk: torch.nn.Module) -> torch.nn.Module:
        """A chunk for Megatron-Core's schedules, run by the engine."""
        return ThroughEngine(self.engine, chunk)

    def step(self, decide: Callable[[], Optional[float]], one_pass: bool) -> bool:
        """Reduce what is left to reduce, and let every shard be stepped by `adamw`.

        Args:
            decide: see GatedAdamW; averaged_norm is known when it is called.
            one_pass: whether the batch had one pass, so that the fusion layer has no gradient.

        Returns:
            False if DeepSpeed found numbers that are not finite and has dropped the gradients.
        """
        if not self.partitions_gradients:
            self._finalize()
        self.adamw.decide, self.adamw.fusion_idle = decide, one_pass
        if one_pass:
            self._clear_fusion()
        self.engine.step()
        return self.engine.was_step_applied()

    def _clear_fusion(self) -> None:
        """The fusion layer has no gradient in a step of one pass; the norm of zero3 would count the last one again."""
        from deepspeed.utils import safe_set_local_grad

        for name, param in self.stage.named_parameters():
            if name.startswith("fusion.") and hasattr(param, "ds_id"):
                safe_set_local_grad(param, torch.zeros_like(param.ds_tensor))

    @property
    def averaged_norm(self) -> float:
        """Norm of the gradients of the step under way, which are averages over data-parallel ranks."""
        norm = float(self.optimizer._global_grad_norm)
        return norm if norm >= 0 else math.inf  # DeepSpeed's sign for a norm that is not finite

    def release_weights(self) -> None:
        """With zero3: keep shards alone, also of the small weights that DeepSpeed keeps gathered between steps."""
        if hasattr(self.optimizer, "parameter_offload"):
            self.optimizer.parameter_offload.partition_all_parameters()

    def _finalize(self) -> None:
        """Sum gradients of norms over sequence shards and of the two copies of a tied embedding."""
        buffers = {param: param._hp_grad for param in self.stage.parameters() if hasattr(param, "_hp_grad")}
        for param, buffer in buffers.items():
            param.main_grad = buffer
        finalize_model_grads([self._unreduced])
        for param in buffers:
            del param.main_grad
