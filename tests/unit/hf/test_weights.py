"""Canonical weights to Hugging Face weights."""

import pytest
import torch

from megatron_fbt.errors import CheckpointError
from megatron_fbt.hf.weights import split_qkv, to_hf_weights
from tests.unit.hf.reference import random_weights, tiny_config


def test_qkv_is_cut_group_by_group():
    model = tiny_config(num_attention_heads=6, num_query_groups=2, kv_channels=2).model
    # One row a channel: group 0 is q0 q1 q2 k v, group 1 is q3 q4 q5 k v, two rows each.
    rows = {letter: part[:, 0].tolist() for letter, part in split_qkv(torch.arange(20.0)[:, None], model).items()}
    query = [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert rows == {"q": query, "k": [6, 7, 16, 17], "v": [8, 9, 18, 19]}


def test_output_gates_lie_between_queries_and_keys_of_their_group():
    model = tiny_config(num_attention_heads=4, num_query_groups=2, kv_channels=2, attention_output_gate=True).model
    # Group 0 is q0 q1 g0 g1 k v, group 1 is q2 q3 g2 g3 k v, two rows each.
    rows = {letter: part[:, 0].tolist() for letter, part in split_qkv(torch.arange(24.0)[:, None], model).items()}
    assert rows["q"] == [0, 1, 2, 3, 12, 13, 14, 15] and rows["g"] == [4, 5, 6, 7, 16, 17, 18, 19]
    assert rows["k"] == [8, 9, 20, 21] and rows["v"] == [10, 11, 22, 23]
    biases = {letter: part.tolist() for letter, part in split_qkv(torch.arange(24.0), model).items()}
    assert biases == rows


def test_gate_rows_come_first():
    config = tiny_config()
    weights = random_weights(config)
    converted = to_hf_weights(weights, config)
    fused = weights["decoder.layers.1.mlp.linear_fc1.weight"]
    assert torch.equal(converted["model.layers.1.mlp.gate_proj.weight"], fused[:40])
    assert torch.equal(converted["model.layers.1.mlp.up_proj.weight"], fused[40:])


def test_every_element_is_exported_once():
    untied = {"qk_layernorm": True, "num_query_groups": 2, "share_embeddings_and_output_weights": False}
    gated = {"fusion": "concat", "num_query_groups": 2, "attention_output_gate": True, "add_qkv_bias": True}
    for fields in ({}, untied, gated, {"fusion": "add"}):
        config = tiny_config(**fields)
        weights = random_weights(config)
        converted = to_hf_weights(weights, config)
        assert sum(w.numel() for w in converted.values()) == sum(w.numel() for w in weights.values())
        before = torch.cat([w.flatten() for w in weights.values()]).sort().values
        assert torch.equal(torch.cat([w.flatten() for w in converted.values()]).sort().values, before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop("decoder.layers.0.mlp.linear_fc2.weight"), "missing decoder.layers.0.mlp"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "not expected extra"),
        (lambda weights: weights.update({"fusion.state_proj.weight": torch.zeros(3, 3)}), r"fusion.*\(3, 3\)"),
        (lambda weights: weights.clear(), "missing decoder.*more"),
        (
            lambda weights: weights.update({"fusion.token_proj.weight": torch.zeros(48, 48)}),
            "not expected fusion.token_pr",
        ),
    ],
)
def test_weights_of_another_model_are_refused(change, words):
    config = tiny_config()
    weights = random_weights(config)
    change(weights)
    with pytest.raises(CheckpointError, match=words):
        to_hf_weights(weights, config)
