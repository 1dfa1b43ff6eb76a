"""Muon steps each hidden matrix as torch's own does, AdamW the rest, and the fusion layer only when it is awake."""

import pytest

from tests.distributed.launch import run_distributed
from tests.distributed.muon_case import VARIANTS, loops


@pytest.fixture(scope="module")
def found():
    return run_distributed(loops, 1, timeout=240)[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_five_steps_equal_torchs_own_muon_and_adamw(found, variant):
    ours, expected = found[variant]
    assert ours.norms == pytest.approx(expected.norms, rel=1e-6)
    assert max(ours.norms) > 1.5 > min(ours.norms), "clipping is active in some steps"
    for step, (a, b) in enumerate(zip(ours.steps, expected.steps)):
        for name, value in b.items():
            difference = (a[name].float() - value.float()).abs().max().item()
            assert difference <= 1e-6, (step, name, difference)
