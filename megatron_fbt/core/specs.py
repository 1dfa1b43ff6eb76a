"""Layer specs of the two backends, and Megatron-Core's configuration built from ours."""

import contextlib
import functools
from typing import Any, Callable, ContextManager, Dict, List, Optional, Union

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset

from megatron_fbt.config.precision import PrecisionConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.backends import backend_of, fuses_weight_gradients
from megatron_fbt.core.fp8 import emulated
from megatron_fbt.core.recompute import RecomputingAttention, RecomputingLayer
from megatron_fbt.core.te_attention import joining
from megatron_fbt.model.layers import RMSNorm, SDPAttention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _keep_uninitialised(weight: torch.Tensor) -> None:
    """Initial values are set by megatron_fbt.model.initialise, not by the layers."""


def _blank(precision: PrecisionConfig) -> Callable[[torch.Tensor], Any]:
    """What layers do with new weights; the delayed recipe would remember the values that become 8 bits."""
    return torch.nn.init.zeros_ if precision.fp8_param_gather else _keep_uninitialised


def transformer_config(config: PretrainConfig) -> TransformerConfig:
    """Megatron-Core's configuration of the stack."""
    model, parallel, dtype = config.model, config.parallel, DTYPES[config.precision.dtype]
    blank = _blank(config.precision)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        qk_layernorm=model.qk_layernorm,
        add_qkv_bias=model.add_qkv_bias,
        attention_output_gate=model.attention_output_gate,
        window_size=None if model.sliding_window is None else (model.sliding_window - 1, 0),
        window_attn_skip_freq=model.window_attn_skip_freq,
        layernorm_epsilon=model.layernorm_epsilon,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=fuses_weight_gradients(config),
        persist_layer_norm=False,
        init_method=blank,
        output_layer_init_method=blank,
        embedding_init_method=_keep_uninitialised,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=parallel.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=parallel.num_layers_in_last_pipeline_stage,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        deallocate_pipeline_outputs=config.memory.deallocate_pipeline_outputs,
        batch_p2p_comm=False,
        calculate_per_token_loss=True,
        **_fp8_options(config.precision),
    )


def _fp8_options(precision: PrecisionConfig) -> Dict[str, Any]:
    """What Megatron-Core's block needs to enter Transformer Engine's FP8 context for each layer."""
    if precision.fp8 is None or precision.fp8_emulated:
        return {}
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    return {
        "fp8": precision.fp8,
        "fp8_recipe": precision.fp8_recipe,
        "fp8_amax_history_len": precision.fp8_amax_history_len,
        "fp8_amax_compute_algo": precision.fp8_amax_compute_algo,
        "fp8_param": precision.fp8_param_gather,
        "first_last_layers_bf16": first + last > 0,
        "num_layers_at_start_in_bf16": first,
        "num_layers_at_end_in_bf16": last,
    }


def _layer_parts(backend: str, fp8: Optional[PrecisionConfig] = None) -> dict:
    """Classes of a layer; fp8 emulates it."""
    if backend == "torch":
        column, row = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
        return {
            "norm": RMSNorm,
            "column": column if fp8 is None else emulated(column, fp8),
            "row": row if fp8 is None else emulated(row, fp8),
            "attention": SDPAttention,
        }
    from megatron.core.extensions import transformer_engine as te

    return {
        "norm": te.TENorm,
        "column": te.TEColumnParallelLinear,
        "row": te.TERowParallelLinear,
        "attention": joining(te.TEDotProductAttention),
    }


def _mlp(submodules: MLPSubmodules) -> Union[ModuleSpec, Callable]:
    """The MLP as a part of a layer: a spec in early releases of Megatron-Core, a function in those that have one."""
    if hasattr(MLP, "as_mlp_submodule"):
        return functools.partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def _add_branch(multiplier: float) -> Callable:
    """Megatron-Core's dropout and residual addition; the branch is multiplied first."""
    if multiplier == 1.0:
        return get_bias_dropout_add

    def scaled(training: bool, fused: bool) -> Callable:
        add = get_bias_dropout_add(training, fused)

        def add_scaled(branch, residual, prob):
            output, bias = branch
            assert bias is None, "layers have no biases"
            return add((output * multiplier, None), residual, prob)

        return add_scaled

    return scaled


def layer_spec(config: TransformerConfig, parts: dict, residual_multiplier: float = 1.0) -> ModuleSpec:
    """One pre-norm transformer layer; parameter names are the same in both backends."""
    add_branch = _add_branch(residual_multiplier)
    qk_norm = parts["norm"] if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=parts["column"],
        core_attention=parts["attention"],
        linear_proj=parts["row"],
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        module=RecomputingLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts["norm"],
            self_attention=ModuleSpec(
                module=RecomputingAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=add_branch,
            pre_mlp_layernorm=parts["norm"],
            mlp=_mlp(MLPSubmodules(linear_fc1=parts["column"], linear_fc2=parts["row"])),
            mlp_bda=add_branch,
        ),
    )


def block_spec(mcore: TransformerConfig, config: PretrainConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and its final norm."""
    backend, precision = backend_of(config), config.precision
    parts, multiplier = _layer_parts(backend), config.model.residual_multiplier
    kinds = {False: layer_spec(mcore, parts, multiplier)}
    if precision.fp8_emulated:
        kinds[True] = layer_spec(mcore, _layer_parts(backend, precision), multiplier)
    first, count = get_transformer_layer_offset(mcore), get_num_layers_to_build(mcore)
    emulate = [precision.fp8_emulated and precision.in_fp8(n, mcore.num_layers) for n in range(first, first + count)]
    layers: List[ModuleSpec] = [kinds[low] for low in emulate]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=parts["norm"])


def column_linear(config: PretrainConfig, low: bool) -> Callable:
    """What the fusion layer's matrices and the output head are built with.

    Args:
        config: the whole configuration.
        low: whether they are in FP8.
    """
    plain = tensor_parallel.ColumnParallelLinear
    if not low:
        return plain
    if config.precision.fp8_emulated:
        return emulated(plain, config.precision)
    from megatron.core.extensions import transformer_engine as te

    def build(*args, config: TransformerConfig, **kwargs) -> torch.nn.Module:
        with get_fp8_context(config, is_init=True):  # its weight in FP8, with fp8_param
            return te.TEColumnParallelLinear(*args, config=config, skip_bias_add=False, is_expert=False, **kwargs)

    return build


def fusion_context(config: PretrainConfig, mcore: TransformerConfig) -> Callable[[], ContextManager]:
    """What the fusion layer's products run in: Transformer Engine's FP8 where it is asked for."""
    if not config.precision.fp8_fusion or config.precision.fp8_emulated:
        return contextlib.nullcontext
    return functools.partial(get_fp8_context, mcore)
