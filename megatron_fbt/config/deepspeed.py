"""DeepSpeed's configuration, made from this project's, with what a user adds to it."""

import json
from pathlib import Path
from typing import Any, Dict, List

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import ConfigError

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
"""Stage of ZeRO by optimizer.sharding."""
NEVER = 1_000_000_000
DECIDED = {
    "optimizer": "optimizer.type, optimizer.lr and their neighbours",
    "scheduler": "optimizer.lr_decay_style and its neighbours",
    "fp16": "precision.dtype",
    "bf16": "precision.dtype",
    "amp": "precision.dtype",
    "torch_autocast": "precision.dtype",
    "data_types": "precision.dtype",
    "activation_checkpointing": "memory.recompute",
    "pipeline": "parallel.pipeline_model_parallel_size",
    "sequence_parallel_size": "parallel.sequence_parallel",
    "checkpoint": "the checkpoint section",
    "zero_optimization.offload_optimizer": "optimizer.offload",
}
"""Parts of DeepSpeed's configuration that fields of ours decide, and which."""
SWITCHED_OFF = ("auto", False, {"enabled": False}, {"enabled": "auto"}, {"device": "none"})
"""Values of such a part that contradict nothing."""
HANDED_ON: Dict[str, type] = {
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "zero_optimization.reduce_bucket_size": int,
    "zero_optimization.allgather_bucket_size": int,
    "zero_optimization.allgather_partitions": bool,
    "zero_optimization.reduce_scatter": bool,
    "zero_optimization.contiguous_gradients": bool,
    "zero_optimization.sub_group_size": int,
    "zero_optimization.stage3_prefetch_bucket_size": int,
    "zero_optimization.stage3_param_persistence_threshold": int,
    "zero_optimization.stage3_model_persistence_threshold": int,
    "zero_optimization.stage3_max_live_parameters": int,
    "zero_optimization.stage3_max_reuse_distance": int,
    "zero_optimization.offload_optimizer.pin_memory": bool,
}
"""What a user may set: buffers and messages, nothing that changes numbers."""


def deepspeed_settings(config: PretrainConfig, data_parallel_size: int) -> Dict[str, Any]:
    """The configuration that DeepSpeed is initialised with: ours, and what optimizer.deepspeed_config adds.

    The caller ends a step, so DeepSpeed accumulates whatever number of micro-batches comes before that; clipping and
    the division by the loss tokens are one factor, which its optimizer is given.

    Args:
        config: with optimizer.sharding zero1, zero2 or zero3.
        data_parallel_size: ranks over which states are sharded.

    Raises:
        ConfigError: optimizer.deepspeed_config cannot be read or contradicts a field; all contradictions are named.
    """
    settings = _generated(config)
    path = config.optimizer.deepspeed_config
    if path is None:
        return settings
    added = _read(path)
    problems = _batch_problems(config, data_parallel_size, added) + _contradictions(added, settings, "")
    if problems:
        raise ConfigError(f"optimizer.deepspeed_config = {path!r}: " + "; ".join(problems))
    return _merged(added, settings)


def _generated(config: PretrainConfig) -> Dict[str, Any]:
    zero: Dict[str, Any] = {"stage": ZERO_STAGES[config.optimizer.sharding], "overlap_comm": False}
    if config.optimizer.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    settings: Dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "steps_per_print": NEVER,
    }
    if config.precision.dtype == "bf16":
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True, "check_grad_overflow": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _read(path: str) -> Dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        reason = f"cannot be read ({type(error).__name__}: {error})"
        raise ConfigError(f"optimizer.deepspeed_config = {path!r}: {reason}; give a JSON file") from error
    if not isinstance(content, dict):
        raise ConfigError(f"optimizer.deepspeed_config = {path!r}: holds no JSON object; give one")
    return content


def _batch_problems(config: PretrainConfig, data_parallel_size: int, added: Dict[str, Any]) -> List[str]:
    """train batch = micro batch x accumulation x data-parallel size; taken out of `added` once compared."""
    training = config.training
    accumulation, rest = divmod(training.global_batch_size, training.micro_batch_size * data_parallel_size)
    if rest:
        return []  # the layout's own rules name it
    ours = {
        "train_batch_size": (training.global_batch_size, "training.global_batch_size"),
        "train_micro_batch_size_per_gpu": (training.micro_batch_size, "training.micro_batch_size"),
        "gradient_accumulation_steps": (
            accumulation,
            "training.global_batch_size / (training.micro_batch_size x data-parallel size)",
        ),
        "gradient_clipping": (config.optimizer.clip_grad, "optimizer.clip_grad"),
    }
    problems = []
    for name, (value, field) in ours.items():
        theirs = added.pop(name, "auto")
        if theirs not in ("auto", value):
            problems.append(f"{name} = {theirs!r}, but {field} = {value!r}; set them equal, or leave {name} out")
    return problems


def _contradictions(added: Dict[str, Any], settings: Dict[str, Any], inside: str) -> List[str]:
    """What is wrong with a part of the user's configuration, beside the same part of ours."""
    problems = []
    for name, theirs in sorted(added.items()):
        path, ours = inside + name, settings.get(name)
        if path in DECIDED and ours is None:
            if theirs not in SWITCHED_OFF:
                problems.append(f"{path} is decided by {DECIDED[path]}; leave it out")
        elif isinstance(ours, dict):
            if isinstance(theirs, dict):
                problems += _contradictions(theirs, ours, f"{path}.")
            elif theirs != "auto":
                problems.append(f"{path} = {theirs!r}: no JSON object; give one, or leave it out")
        elif name in settings:
            if theirs not in ("auto", ours):
                problems.append(f"{path} = {theirs!r}, but this run needs {ours!r}; leave it out")
        elif path not in HANDED_ON:
            problems.append(
                f"{path} is nothing that is handed on to DeepSpeed; leave it out (docs/sharding.md has what is)"
            )
        elif theirs != "auto" and not _fits(theirs, HANDED_ON[path]):
            kind = "true or false" if HANDED_ON[path] is bool else "a whole number from 0 on"
            problems.append(f"{path} = {theirs!r}: must be {kind}")
    return problems


def _fits(value: Any, kind: type) -> bool:
    """Whether a JSON value is of a kind; 5e8 is a whole number."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float)) and value >= 0 and value == value // 1


def _merged(added: Dict[str, Any], settings: Dict[str, Any], inside: str = "") -> Dict[str, Any]:
    """Our values, and what the user adds to them."""
    merged = dict(settings)
    for name, theirs in added.items():
        path, ours = inside + name, settings.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            merged[name] = _merged(theirs, ours, f"{path}.")
        elif path in HANDED_ON and theirs != "auto":
            merged[name] = HANDED_ON[path](theirs)
    return merged


def shards_over_stages(sharding: str) -> bool:
    """Whether a sharding works over several pipeline stages."""
    return ZERO_STAGES.get(sharding, 1) == 1


def sharding_problems(config: PretrainConfig) -> List[str]:
    """What cannot be combined with optimizer.sharding."""
    optimizer, parallel = config.optimizer, config.parallel
    if optimizer.sharding not in ZERO_STAGES:
        return []
    chosen = f"optimizer.sharding = {optimizer.sharding!r}"
    problems = []
    stages = parallel.pipeline_model_parallel_size
    if stages > 1 and not shards_over_stages(optimizer.sharding):
        problems.append(
            f"{chosen}: DeepSpeed shards gradients during the backward, which pipeline stages cannot agree on, and "
            f"parallel.pipeline_model_parallel_size = {stages}; set that to 1, or optimizer.sharding to zero1 or "
            "megatron"
        )
    if parallel.overlap_grad_reduce:
        problems.append(
            f"parallel.overlap_grad_reduce = true: {chosen} leaves the reduction to DeepSpeed; set it to false"
        )
    return problems
