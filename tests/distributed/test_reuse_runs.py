"""Whole runs with K = 1, 2 and 3 in turn: prefix reuse and chunked loss change no number, on or off, nor between."""

import shutil
from pathlib import Path

import pytest

from tests.distributed.launch import run_distributed
from tests.distributed.run_case import rows_of, run, run_config, stop_before, write_corpus

OFF = {"feedback__prefix_reuse": False, "memory__chunked_loss": False}
WHOLE_CHUNK = {"memory__loss_chunk_mib": 0.001}
MULTI_PASS_STEP = 9
"""Before it runs are stopped; some steps before and after have several passes."""


def runs(rank, world_size, folder, corpus):
    place = Path(folder)
    for name, fields in (("on", {}), ("off", OFF), ("chunks", WHOLE_CHUNK)):
        assert run(run_config(place / name, corpus, **fields)) == "finished"
    for name, first, then in (("on then off", {}, OFF), ("off then on", OFF, WHOLE_CHUNK), ("resumed", {}, {})):
        assert run(run_config(place / name, corpus, **first), stop_before(MULTI_PASS_STEP)) == "StoppedBySignal"
        assert run(run_config(place / name, corpus, **then)) == "finished"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reuse")
    run_distributed(runs, 1, str(folder), write_corpus(folder), timeout=300, init_group=False)
    yield folder
    shutil.rmtree(folder)


def numbers(row: dict) -> dict:
    """Losses and gradient norm of a step."""
    return {
        name: value for name, value in row.items() if name.startswith("loss_pass_") or name in ("loss", "grad_norm")
    }


@pytest.mark.parametrize("name", ["off", "chunks", "on then off", "off then on"])
def test_losses_and_gradient_norms_are_those_of_whole_passes(folder, name):
    expected, found = rows_of(folder / "on"), rows_of(folder / name)
    assert {row["passes"] for row in expected} == {1, 2, 3}
    assert (
        {row["passes"] for row in expected[:MULTI_PASS_STEP]}
        != {1}
        != {row["passes"] for row in expected[MULTI_PASS_STEP:]}
    )
    assert [row["passes"] for row in found] == [row["passes"] for row in expected]
    for one, other in zip(expected, found, strict=True):
        assert numbers(other) == pytest.approx(numbers(one), rel=3e-6), one["step"]


def test_a_resumed_run_has_the_same_bits(folder):
    assert [numbers(row) for row in rows_of(folder / "resumed")] == [numbers(row) for row in rows_of(folder / "on")]
