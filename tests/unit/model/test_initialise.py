"""Initial values: every rank computes its own elements, whatever the layout."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_fbt.config.model import ModelConfig
from megatron_fbt.model import initialise
from megatron_fbt.model.initialise import global_elements, global_name, initialise_parameters

VOCAB = 10
D, F = 16, 24
CONFIG = ModelConfig(num_layers=8, hidden_size=D, ffn_hidden_size=F, init_method_std=0.1)
LAYER = "decoder.layers.3."
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
MATRICES = {  # name: ((rows, columns), dimension that is split over tensor-parallel ranks)
    EMBEDDING: ((VOCAB, D), 0),
    HEAD: ((VOCAB, D), 0),
    "fusion.state_proj.weight": ((D, D), 0),
    "fusion.token_gate.weight": ((D, D), 0),
    "fusion.token_proj.weight": ((D, D), 0),
    "fusion.concat_state_proj.weight": ((D, D), 0),
    LAYER + "self_attention.linear_qkv.weight": ((32, D), 0),
    LAYER + "self_attention.linear_proj.weight": ((D, 16), 1),
    LAYER + "mlp.linear_fc1.weight": ((2 * F, D), 0),
    LAYER + "mlp.linear_fc2.weight": ((D, F), 1),
    LAYER + "replicated.weight": ((8, 12), None),
}
VECTORS = {
    LAYER + "input_layernorm.weight": D,
    LAYER + "self_attention.linear_qkv.bias": D,
    "decoder.final_layernorm.weight": D,
}


def shard(shape, split, tensor_size, dtype=torch.float32):
    """A rank's part of a matrix as Megatron-Core marks it, full of NaN."""
    shape = list(shape)
    if split is not None:
        shape[split] //= tensor_size
    param = torch.nn.Parameter(torch.full(shape, math.nan, dtype=dtype))
    param.tensor_model_parallel = split is not None
    if split is not None:
        param.partition_dim = split
    return param


def initialised(tensor_size, padded, seed=1234, config=CONFIG, dtype=torch.float32):
    """Every rank's parameters, by global name."""
    ranks = []
    for rank in range(tensor_size):
        shapes = {name: ((padded, D) if name in (EMBEDDING, HEAD) else s, d) for name, (s, d) in MATRICES.items()}
        parameters = {name: shard(*entry, tensor_size, dtype) for name, entry in shapes.items()}
        parameters.update({name: torch.nn.Parameter(torch.full((n,), math.nan)) for name, n in VECTORS.items()})
        initialise_parameters(parameters, config, VOCAB, seed, rank, tensor_size)
        ranks.append({name: param.data for name, param in parameters.items()})
    return ranks


def joined(ranks, name):
    """The whole matrix from all ranks' parts."""
    parts = [rank[name] for rank in ranks]
    split = MATRICES[name][1]
    if split is None:
        assert all(torch.equal(parts[0], part) for part in parts)
        return parts[0]
    if name.endswith("linear_fc1.weight"):
        halves = [part.split(F // len(parts)) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(parts, dim=split)


@pytest.mark.parametrize(("tensor_size", "padded"), [(1, 12), (2, 12), (4, 16), (4, 20), (8, 24)])
@pytest.mark.parametrize("name", MATRICES)
def test_shards_are_parts_of_the_single_process_values(name, tensor_size, padded):
    expected = joined(initialised(1, VOCAB), name)
    found = joined(initialised(tensor_size, padded), name)
    rows = len(expected)
    assert torch.equal(found[:rows], expected)
    assert expected.all() and len(found) == (padded if name in (EMBEDDING, HEAD) else rows)
    assert not found[rows:].any(), "padded rows are zero"


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@pytest.mark.parametrize("name", MATRICES)
def test_elements_cover_the_whole_matrix_once(name, tensor_size):
    shape, split = (24, 16) if name in (EMBEDDING, HEAD) else MATRICES[name][0], MATRICES[name][1]
    parts = [global_elements(name, shard(shape, split, tensor_size), rank, tensor_size) for rank in range(tensor_size)]
    found = joined([{name: part} for part in parts], name)
    assert torch.equal(found, torch.arange(shape[0] * shape[1]).view(shape))


def test_norm_weights_are_one_and_biases_zero():
    for rank in initialised(2, 12):
        for name in VECTORS:
            assert torch.equal(rank[name], torch.full((D,), 0.0 if name.endswith("bias") else 1.0))


def test_names_and_seeds_have_values_of_their_own():
    ranks = [initialised(1, VOCAB, seed)[0] for seed in (0, 1, 2**32 - 1)]
    first_elements = [rank[name][0, 0].item() for rank in ranks for name in MATRICES]
    assert len(set(first_elements)) == 3 * len(MATRICES)


def test_bfloat16_values_are_the_rounded_ones():
    half, full = initialised(1, 12, dtype=torch.bfloat16)[0], initialised(1, 12)[0]
    assert all(torch.equal(half[name], full[name].bfloat16()) for name in MATRICES)


@pytest.mark.parametrize("chunk", [1, 7, 16, 255, 256])
def test_chunks_leave_no_trace(monkeypatch, chunk):
    name = "fusion.state_proj.weight"
    expected = {n: initialised(1, 12)[0][n] for n in (name, LAYER + "mlp.linear_fc2.weight")}
    monkeypatch.setattr(initialise, "CHUNK", chunk)
    for key, value in expected.items():
        param = shard(*MATRICES[key], 1)
        initialise_parameters({key: param}, CONFIG, VOCAB, 1234, 0, 1)
        assert torch.equal(param.data, value)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        (EMBEDDING, 0.1),
        (HEAD, 0.1),
        (LAYER + "self_attention.linear_qkv.weight", 0.1),
        (LAYER + "mlp.linear_fc1.weight", 0.1),
        (LAYER + "self_attention.linear_proj.weight", 0.1 / 4),
        (LAYER + "mlp.linear_fc2.weight", 0.1 / 4),
    ],
)
def test_normal_values(name, std):
    param = shard((256, 400), 0, 1)
    initialise_parameters({name: param}, CONFIG, 256, 5, 0, 1)
    values = param.data.double()
    assert values.mean().item() == pytest.approx(0, abs=5 * std / values.numel() ** 0.5)
    assert values.std().item() == pytest.approx(std, rel=0.012)
    assert ((values / std).abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.008)


def test_without_depth_scaling_residual_outputs_are_like_the_others():
    plain = replace(CONFIG, scaled_init=False)
    for name in (LAYER + "self_attention.linear_proj.weight", LAYER + "mlp.linear_fc2.weight"):
        scaled, unscaled = (torch.nn.Parameter(torch.empty(256, 400)) for _ in range(2))
        initialise_parameters({name: scaled}, CONFIG, 256, 5, 0, 1)
        initialise_parameters({name: unscaled}, plain, 256, 5, 0, 1)
        torch.testing.assert_close(unscaled.data, 4 * scaled.data)


@pytest.mark.parametrize("hidden", [12, 192])
@pytest.mark.parametrize(
    ("name", "fan_in"),
    [("state_proj", 1), ("token_gate", 1), ("token_proj", 1), ("concat_state_proj", 2), ("concat_token_proj", 2)],
)
def test_fusion_values_are_uniform_with_standard_deviation_one_over_root_of_fan_in(hidden, name, fan_in):
    config = ModelConfig(hidden_size=hidden, init_method_std=0.1)
    param = shard((256, 192), 0, 1)
    initialise_parameters({f"fusion.{name}.weight": param}, config, VOCAB, 5, 0, 1)
    bound = math.sqrt(3 / (hidden * fan_in))
    assert bound * 0.999 < param.data.abs().max() <= bound
    assert param.data.std().item() == pytest.approx((hidden * fan_in) ** -0.5, rel=0.01)
    assert param.data.mean().abs() < 0.02 * bound


def test_global_names():
    assert global_name("decoder.layers.0.mlp.linear_fc1.weight", 6, True) == "decoder.layers.6.mlp.linear_fc1.weight"
    assert global_name("decoder.layers.12.x", 0, False) == "decoder.layers.12.x"
    assert global_name("decoder.final_layernorm.weight", 6, True) == "decoder.final_layernorm.weight"
    assert global_name(HEAD, 6, True) == EMBEDDING and global_name(HEAD, 6, False) == HEAD
