"""FLOP counts, against PyTorch's counter on an independent implementation of the same shape."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_fbt.config.model import ModelConfig
from megatron_fbt.training.flops import fusion_flops_per_token, model_flops_per_token, step_flops

SHAPE = ModelConfig(
    num_layers=3, hidden_size=48, ffn_hidden_size=88, num_attention_heads=6, num_query_groups=2, kv_channels=12
)
SEQUENCE, VOCAB = 40, 211


def counted_llama_flops():
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=SHAPE.num_layers,
            hidden_size=SHAPE.hidden_size,
            intermediate_size=SHAPE.ffn_size,
            num_attention_heads=SHAPE.num_attention_heads,
            num_key_value_heads=SHAPE.query_groups,
            head_dim=SHAPE.head_size,
            vocab_size=VOCAB,
            attn_implementation="eager",
        )
    )
    with FlopCounterMode(display=False) as counter:
        llama(input_ids=torch.zeros(1, SEQUENCE, dtype=torch.long)).logits.sum().backward()
    by_module = counter.get_flop_counts()
    rotary_angles = sum(sum(by_module[name].values()) for name in list(by_module) if name.endswith("rotary_emb"))
    return counter.get_total_flops() - rotary_angles


def full_attention_flops():
    """Scores and values of one layer's forward pass over all SEQUENCE^2 pairs, for the whole row."""
    return 4 * SHAPE.num_attention_heads * SHAPE.head_size * SEQUENCE**2


def test_one_pass_equals_the_counted_operations_with_half_the_attention():
    pairs_not_needed = 1 - (SEQUENCE + 1) / (2 * SEQUENCE)
    masked = 3 * SHAPE.num_layers * full_attention_flops() * pairs_not_needed
    expected = (counted_llama_flops() - masked) / SEQUENCE
    assert model_flops_per_token(SHAPE, SEQUENCE, VOCAB) == pytest.approx(expected, rel=1e-12)


def test_windows_and_gates_are_counted_layer_by_layer():
    shape = replace(SHAPE, sliding_window=7, window_attn_skip_freq=2, attention_output_gate=True)  # layer 2 sees all
    width = SHAPE.num_attention_heads * SHAPE.head_size
    pairs_full = sum(1 for query in range(SEQUENCE) for key in range(query + 1))
    pairs_window = sum(1 for query in range(SEQUENCE) for key in range(query + 1) if query - key < 7)
    less = 3 * 2 * 4 * width * (pairs_full - pairs_window) / SEQUENCE
    gates = 3 * 3 * 2 * SHAPE.hidden_size * width
    expected = model_flops_per_token(SHAPE, SEQUENCE, VOCAB) - less + gates
    assert model_flops_per_token(shape, SEQUENCE, VOCAB) == pytest.approx(expected, rel=1e-12)
    wide = replace(SHAPE, sliding_window=SEQUENCE)
    assert model_flops_per_token(wide, SEQUENCE, VOCAB) == model_flops_per_token(SHAPE, SEQUENCE, VOCAB)


def test_passes_count_and_only_extra_passes_have_the_fusion():
    one = model_flops_per_token(SHAPE, SEQUENCE, VOCAB)
    fusion = fusion_flops_per_token(SHAPE)
    assert fusion == 3 * 2 * 2 * 48 * 48
    assert step_flops(SHAPE, SEQUENCE, VOCAB, tokens=1000, passes=1) == 1000 * one
    assert step_flops(SHAPE, SEQUENCE, VOCAB, tokens=1000, passes=3) == 1000 * (3 * one + 2 * fusion)
