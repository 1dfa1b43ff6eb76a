"""Diagnostics are the values computed by hand, sequential validation is decoding, in every kind of layout."""

import itertools
import json

import pytest

from tests.distributed import diagnostics_case
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Grid
from tests.distributed.run_case import SHARP_PHASE, STEPS, write_corpus

GRIDS = [Grid(), Grid(tensor=2, pipeline=2, sequence_parallel=True), Grid(tensor=2, data=2)]


@pytest.fixture(scope="module")
def expected():
    (found,) = run_distributed(diagnostics_case.by_hand, 1, timeout=240)
    return found


@pytest.fixture(scope="module", params=GRIDS, ids=str)
def ranks(request):
    return run_distributed(diagnostics_case.measure, request.param.world_size, request.param, timeout=240)


def test_norms_and_shares_are_those_computed_by_hand(expected, ranks):
    for found in ranks:
        assert found["health"] == pytest.approx(expected["health"], rel=1e-5)
    assert 0.01 < expected["health"]["gate_low_share"] < 0.5 and 0.2 < expected["health"]["fused_share_pass_2"] < 0.8


@pytest.mark.parametrize("name", ["fused 0", "fused 1"])
def test_sequential_validation_is_decoding_token_by_token(expected, ranks, name):
    for found in ranks:
        assert found[name][-1] == pytest.approx(expected[name], rel=1e-5)
        assert found[name][1] != pytest.approx(expected[name], rel=1e-4), "two passes must not do for the recurrence"
    assert expected["fused 0"] != pytest.approx(expected["fused 1"], rel=1e-4)


def test_a_step_without_diagnostics_costs_what_it_costs_without_the_feature(tmp_path):
    arguments = (str(tmp_path), write_corpus(tmp_path))
    for costs in run_distributed(diagnostics_case.step_costs, 2, *arguments, timeout=600, init_group=False):
        off, on = costs["off"], costs["on"]
        assert len(off) == len(on) == STEPS - SHARP_PHASE
        assert [step for step, (a, b) in enumerate(zip(off, on), SHARP_PHASE + 1) if a != b] == [10]
        before, after = off[9 - SHARP_PHASE], on[9 - SHARP_PHASE]
        assert before["aten::mm"] > 20 and after["aten::square"] > before["aten::square"]
        collectives = {name for name in before if name.startswith("c10d::")}
        assert len(collectives) > 1
        assert {name for name in collectives if after[name] != before[name]} == {"c10d::allreduce"}
        assert after["c10d::allreduce"] == before["c10d::allreduce"] + 1

    rows = [json.loads(line) for line in (tmp_path / "on" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "state_rms_pass_1" in row] == [10] and rows[9]["passes"] == 3
    measured = {"update_norm_pass_3", "state_rms_pass_3", "fused_share_pass_3", "gate_low_share", "gate_high_share"}
    assert measured <= rows[9].keys()
    for row in rows:
        for k in range(2, row["passes"] + 1):
            assert row[f"gain_pass_{k}"] == pytest.approx(row["loss_pass_1"] - row[f"loss_pass_{k}"])
    assert [row["token_equivalents"] for row in rows] == list(
        itertools.accumulate((64 if row["step"] <= 4 else 128) * row["passes"] for row in rows)
    )
