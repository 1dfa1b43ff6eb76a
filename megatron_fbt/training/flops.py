"""Model floating-point operations: what the mathematics needs, whatever is recomputed or padded.

A multiply-add counts as 2; a backward pass costs twice its forward pass; norms, activations, element-wise gates and the
loss are left out. Sliding windows count; document masks depend on the data and do not: a row counts as one document.
"""

from typing import Optional

from megatron_fbt.config.model import ModelConfig
from megatron_fbt.config.parameter_count import fusion_parameters

FORWARD_AND_BACKWARD = 3


def keys_seen(sequence_length: int, window: Optional[int] = None) -> float:
    """Keys that a position sees on average: min(t, window) over t = 1..s; (s + 1) / 2 without a window."""
    width = sequence_length if window is None else min(window, sequence_length)
    growing = width * (width + 1) / 2  # the first `width` positions see 1, 2, ..., width
    return (growing + (sequence_length - width) * width) / sequence_length


def model_flops_per_token(model: ModelConfig, sequence_length: int, vocab_size: int) -> float:
    """Operations of forward and backward of ONE pass, per token.

    Per layer 2 D (np + 2 ng) hn + 2 np hn D for the projections (and 2 D np hn for an output gate), 4 np hn keys for
    scores and values over the keys that a position sees on average, 6 D F for the SwiGLU; 2 D V for the head.

    Args:
        model: shape of the network.
        sequence_length: s, tokens in a row.
        vocab_size: V, without padding.
    """
    head = 2 * model.hidden_size * vocab_size
    return float(FORWARD_AND_BACKWARD * (layer_flops_per_token(model, sequence_length) + head))


def layer_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Operations of the FORWARD of all layers in one pass, per token; arguments as in model_flops_per_token."""
    hidden, query_width = model.hidden_size, model.num_attention_heads * model.head_size
    key_value_width = 2 * model.query_groups * model.head_size
    gates = query_width if model.attention_output_gate else 0
    projections = 2 * hidden * (query_width + gates + key_value_width) + 2 * query_width * hidden
    mlp = 6 * hidden * model.ffn_size
    return model.num_layers * (projections + mlp) + attention_flops_per_token(model, sequence_length)


def attention_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Operations of the FORWARD of scores and values in all layers, per token."""
    layers = range(1, model.num_layers + 1)
    keys = sum(keys_seen(sequence_length, model.window_of(layer)) for layer in layers)
    return 4 * model.num_attention_heads * model.head_size * keys


def fusion_flops_per_token(model: ModelConfig) -> float:
    """Operations of forward and backward of the fusion layer (any variant), per token of an extra pass."""
    return float(FORWARD_AND_BACKWARD * 2 * fusion_parameters(model))


def step_flops(model: ModelConfig, sequence_length: int, vocab_size: int, tokens: int, passes: int) -> float:
    """Operations of one optimizer step, with its passes counted.

    Args:
        model: shape of the network.
        sequence_length: tokens in a row.
        vocab_size: vocabulary without padding.
        tokens: tokens of the global batch, each counted once.
        passes: K; passes 2..K run the fusion too.
    """
    each_pass = model_flops_per_token(model, sequence_length, vocab_size)
    return tokens * (passes * each_pass + (passes - 1) * fusion_flops_per_token(model))
