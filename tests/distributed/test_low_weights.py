"""Weights kept and gathered in 8 bits: the same training, and checkpoints that hold none of their bytes."""

import pytest
import torch

from tests.distributed.launch import run_distributed
from tests.distributed.low_weights import LowTensor
from tests.distributed.low_weights_case import RESUMED, run
from tests.distributed.model_case import Grid

LINEAR = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
MASTER = "optimizer.master."


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two data-parallel ranks saw."""
    return run_distributed(run, 2, Grid(data=2), tmp_path_factory.mktemp("low"), timeout=200)


def losses(reports):
    return [report.loss_per_pass for report in reports]


def test_layers_with_fp8_products_alone_keep_their_weights_in_8_bits(ranks):
    expected = sorted(f"decoder.layers.{layer}.{name}.weight" for layer in (0, 1) for name in LINEAR)
    expected += ["fusion.state_proj.weight", "fusion.token_gate.weight"]
    for found in ranks:
        assert found["kept", "low"] == found["kept", "blocks"] == expected and found["kept", "plain"] == []
        elements = sum(weight.numel() for weight in found["end", "low"].values())
        assert found["bytes", "plain"] - found["bytes", "low"] == elements


def test_megatron_core_is_told(ranks):
    for found in ranks:
        assert found["options", "low"] == (True, False, "tensorwise")
        assert found["options", "blocks"] == (True, True, "mxfp8")
        assert found["options", "plain"] == (False, False, None)


def test_nothing_is_quantised_that_memory_happens_to_hold(ranks):
    assert ranks[0]["blank", "low"] == ranks[0]["blank", "blocks"] == [0.0, 0.0]
    assert ranks[0]["blank", "plain"] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["low", "blocks"])
def test_training_is_that_of_weights_rounded_where_they_are_used(ranks, name):
    for found in ranks:
        assert losses(found["unbroken", name]) == losses(found["unbroken", "plain"])
        norms, expected = ([r.grad_norm for r in found["unbroken", case]] for case in (name, "plain"))
        assert norms == pytest.approx(expected, rel=1e-12)
        for weight, values in ranks[0]["end", name].items():
            assert torch.equal(found["end", name][weight], values)


@pytest.mark.parametrize("case, source", [(case.name, source.name) for case, source in RESUMED])
def test_a_resumed_run_equals_an_unbroken_one(ranks, case, source):
    """Also where weights are kept in 8 bits from now on, or no longer."""
    for found in ranks:
        assert losses(found["resumed", case, source]) == losses(found["unbroken", case][2:])
        if case == source:
            assert found["resumed", case, source] == found["unbroken", case][2:]


@pytest.mark.parametrize("name", ["low", "blocks"])
def test_checkpoints_hold_weights_as_without(ranks, name):
    stored, plain = ranks[0]["stored"][name], ranks[0]["stored"]["plain"]
    assert stored.keys() == plain.keys()
    for key, tensor in stored.items():
        assert tensor.dtype == plain[key].dtype and torch.equal(tensor, plain[key]), key
        if key.startswith(MASTER):
            assert torch.equal(stored[key.removeprefix(MASTER)], tensor.bfloat16())


def test_exports_see_no_quantised_bytes(ranks):
    assert {tensor.dtype for tensor in ranks[0]["exported"].values()} == {torch.bfloat16}
    for name, tensor in ranks[0]["exported"].items():
        assert torch.equal(tensor, ranks[0]["stored"]["plain"][name][: len(tensor)])


def test_a_new_run_rounds_the_weights_that_it_begins_with(ranks):
    for found in ranks:
        assert len(found["begun"]) == 10
        for name, values in found["begun"].items():
            assert torch.equal(values, LowTensor.of(found["stored"]["plain"][name]).dequantize())
