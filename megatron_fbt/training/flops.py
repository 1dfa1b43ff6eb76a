"""Model floating-point operations: what the mathematics needs, whatever is recomputed or padded.

A multiply-add counts as 2; a backward pass costs twice its forward pass; norms, activations and the loss are left out.
"""

from megatron_fbt.config.model import ModelConfig

FORWARD_AND_BACKWARD = 3


def model_flops_per_token(model: ModelConfig, sequence_length: int, vocab_size: int) -> float:
    """Operations of forward and backward of ONE pass, per token.

    Per layer 2 D (np + 2 ng) hn + 2 np hn D for the projections, 4 np hn (s + 1) / 2 for scores and values over the
    (s + 1) / 2 keys that a position sees on average under the causal mask, 6 D F for the SwiGLU; 2 D V for the head.

    Args:
        model: shape of the network.
        sequence_length: s, tokens in a row.
        vocab_size: V, without padding.
    """
    hidden, query_width = model.hidden_size, model.num_attention_heads * model.head_size
    key_value_width = 2 * model.query_groups * model.head_size
    projections = 2 * hidden * (query_width + key_value_width) + 2 * query_width * hidden
    attention = 4 * query_width * (sequence_length + 1) / 2
    mlp = 6 * hidden * model.ffn_size
    head = 2 * hidden * vocab_size
    return float(FORWARD_AND_BACKWARD * (model.num_layers * (projections + attention + mlp) + head))


def fusion_flops_per_token(model: ModelConfig) -> float:
    """Operations of forward and backward of the fusion layer (W_U and W_G, D x D each), per token of an extra pass."""
    return float(FORWARD_AND_BACKWARD * 2 * 2 * model.hidden_size**2)


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
