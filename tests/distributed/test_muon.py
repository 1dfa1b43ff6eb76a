"""Muon steps each hidden matrix as torch's own does, AdamW the rest, and the fusion layer only when it is awake."""

import pytest
import torch

from megatron_fbt.config.optimizer import OptimizerConfig
from megatron_fbt.errors import ConfigError
from tests.distributed import muon_case
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import whole
from tests.distributed.muon_case import PASSES, VARIANTS
from tests.distributed.recipe_case import VOCAB


@pytest.fixture(scope="module")
def alone():
    return run_distributed(muon_case.alone, 1, timeout=240)[0]


@pytest.fixture(scope="module")
def together():
    return run_distributed(muon_case.together, 2, timeout=240)


@pytest.mark.parametrize("variant", VARIANTS)
def test_five_steps_equal_torchs_own_muon_and_adamw(alone, variant):
    ours, expected = alone[variant]
    assert ours.norms == pytest.approx(expected.norms, rel=1e-6)
    assert max(ours.norms) > 1.5 > min(ours.norms), "clipping is active in some steps"
    for step, (a, b) in enumerate(zip(ours.weights, expected.weights, strict=True)):
        for name, value in b.tensors.items():
            torch.testing.assert_close(a.tensors[name], value, rtol=0, atol=1e-6, msg=f"{name} after step {step}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_fusion_layer_sleeps_until_the_first_multi_pass_batch_and_then_moves_in_every_step(alone, variant):
    ours, _ = alone[variant]
    fusion = [name for name in ours.weights[0].tensors if name.startswith("fusion.")]
    woken = next(step for step, passes in enumerate(PASSES) if passes > 1)
    assert fusion and PASSES[woken + 1] == 1
    for name in fusion:
        weights, moments = ([piece.tensors[name] for piece in pieces] for pieces in (ours.weights, ours.moments))
        for step in range(woken):
            assert torch.equal(weights[step + 1], weights[0]) and not moments[step + 1].any()
        for step in range(woken, len(PASSES)):
            assert not torch.equal(weights[step + 1], weights[step]), step
        assert moments[woken + 1].any()
        torch.testing.assert_close(moments[woken + 2], moments[woken + 1] * 0.9, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["tp1pp1dp2", "tp1pp2dp1"])
def test_other_layouts_equal_one_process(alone, together, layout):
    expected, ranks = alone[""], [rank[layout] for rank in together]
    assert ranks[0].norms == ranks[1].norms == pytest.approx(expected.norms, rel=1e-4)
    for kind in ("weights", "moments"):
        for step, values in enumerate(getattr(expected, kind)):
            found = whole([getattr(rank, kind)[step] for rank in ranks], VOCAB)
            for name, value in whole([values], VOCAB).items():
                difference = (found[name] - value).double().norm().item()
                assert difference <= 1e-4 * value.double().norm().item(), (kind, step, name)


def test_a_torch_without_muon_is_told(monkeypatch):
    from megatron_fbt.core.muon import MuonWithAdamW

    monkeypatch.delattr(torch.optim, "Muon")
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ConfigError, match="optimizer.type = 'muon': torch .*; install torch 2.9"):
        MuonWithAdamW(OptimizerConfig(type="muon"), adamw, {})
