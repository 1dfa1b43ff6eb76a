"""What layers read, against the formulas in double precision."""

import pytest
import torch

from megatron_fbt.analysis.layer_inputs import layer_inputs, passes_of
from megatron_fbt.errors import ConfigError
from tests.unit.hf.exports import make_model
from tests.unit.hf.reference import random_weights, tiny_config

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model():
    config = tiny_config()
    return make_model(random_weights(config), config)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(3))


def unit(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@torch.no_grad()
def test_stack_inputs_are_fuse_of_the_pass_before(model, ids):
    found = layer_inputs(model, ids, [0], ["plain", "fused2", "fused1", "recurrent"])
    weights = model.model.state_dict()
    embedding = weights["embed_tokens.weight"][ids].double()
    gate = torch.sigmoid(unit(embedding) @ weights["fusion.token_gate.weight"].double().T)
    states = [h.double() for h in model.model.parallel_passes(ids, 9)]
    assert torch.allclose(found[0, "plain"].double(), unit(embedding), atol=TOLERANCE)
    for regime, before in (("fused1", states[0]), ("fused2", states[1]), ("recurrent", states[8])):
        fused = unit(before[:, :-1] @ weights["fusion.state_proj.weight"].double().T * gate[:, 1:])
        expected = torch.cat([unit(embedding[:, :1]), fused], dim=1)
        assert torch.allclose(found[0, regime].double(), expected, atol=TOLERANCE), regime
        assert not torch.allclose(found[0, "plain"].double(), expected, atol=0.1)


@torch.no_grad()
def test_later_layers_and_the_norm_read_what_the_layer_before_made(model, ids):
    found = layer_inputs(model, ids, [2, 1], ["recurrent", "fused1"])
    assert set(found) == {(layer, regime) for layer in (1, 2) for regime in ("recurrent", "fused1")}
    states = model.model.parallel_passes(ids, 9)
    assert torch.allclose(model.model.norm(found[2, "fused1"]), states[1], atol=TOLERANCE)
    assert torch.allclose(model.model.norm(found[2, "recurrent"]), states[8], atol=TOLERANCE)
    assert not torch.allclose(found[1, "fused1"], found[2, "fused1"], atol=0.1)


def test_no_hook_is_left_behind(model, ids):
    layer_inputs(model, ids, [0, 2], ["plain"])
    assert not model.model.layers[0]._forward_pre_hooks and not model.model.norm._forward_pre_hooks


def test_names_of_regimes():
    assert [passes_of(name) for name in ("plain", "fused1", "fused12", "recurrent")] == [1, 2, 13, 0]
    for name in ("fused0", "fused", "soft", ""):
        with pytest.raises(ConfigError, match="must be plain, fused1"):
            passes_of(name)
