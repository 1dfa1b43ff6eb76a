"""Whole runs in real processes: stopped, resumed, moved to other layouts, fed with bad numbers."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from megatron_fbt.config.load import load_yaml
from megatron_fbt.training.metrics import read_metrics
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import (
    SHARP_PHASE,
    STEPS,
    TIMES,
    VOCAB,
    branch,
    checkpoint_of,
    rows_of,
    run,
    run_config,
    stop_before,
    write_corpus,
)

UNTIED = {"model__share_embeddings_and_output_weights": False}
BF16 = {"precision__dtype": "bf16"}
DROPOUT = {"model__attention_dropout": 0.1, "model__hidden_dropout": 0.1}
MUON = {"optimizer__type": "muon", "model__attention_output_gate": True}
SHARDED = {"optimizer__sharding": "megatron"}
# World size -> steps at whose checkpoint a run goes on, and steps in which it is stopped.
SAVES = {1: (3, SHARP_PHASE, 9), 2: (SHARP_PHASE,), 4: (9,)}
STOPS = {1: (1, SHARP_PHASE + 1, 11), 2: (1, SHARP_PHASE + 2), 4: (4,)}
# World size -> {name: (layout, settings)}; what is left of the world is data parallel.
RESUMED = {
    1: {
        "plain": ((1, 1), {**DROPOUT}),
        "bf16": ((1, 1), {**BF16, **UNTIED, **SHARDED}),
        "muon": ((1, 1), {**BF16, **MUON}),
    },
    2: {
        "data": ((1, 1), {**BF16, **DROPOUT, **SHARDED}),
        "tensor": ((2, 1), {**DROPOUT, **UNTIED}),
        "pipeline": ((1, 2), {**DROPOUT, **SHARDED}),
    },
    4: {"tensor-pipeline": ((2, 2), {**BF16, **DROPOUT}), "data-pipeline": ((1, 2), {**UNTIED, **SHARDED})},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def unbroken_and_resumed(rank, world_size, folder, corpus, variants):
    """Each variant once without a break, then from copies at checkpoints, and stopped by signals."""
    for name, (layout, settings) in variants.items():
        whole = Path(folder) / name / "whole"
        config = run_config(whole, corpus, layout, checkpoint__save_interval=1 if world_size == 1 else 3, **settings)
        assert run(config) == "finished"
        for step in SAVES[world_size]:
            copied = Path(folder) / name / f"saved{step}"
            config.run.dir, config.checkpoint.save_interval = str(copied), None
            once_on_first_rank(rank, world_size, copied, lambda c=copied, w=whole, s=step: branch(w, c, s))
            assert run(config) == "finished"
        config.run.dir = str(Path(folder) / name / "stopped")
        for number, step in enumerate(STOPS[world_size]):
            assert run(config, stop_before(step, rank=number % world_size)) == "StoppedBySignal"
        assert run(config) == "finished"
        assert run(config, lambda trainer: pytest.fail("a finished run goes on")) == "finished"


def once_on_first_rank(rank, world_size, folder, action):
    """The other ranks wait for a file."""
    import time

    flag = folder.with_name(folder.name + ".ready")
    if rank == 0:
        action()
        flag.touch()
    while not flag.exists():
        time.sleep(0.01)


@pytest.mark.parametrize("world_size", RESUMED)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(tmp_path, corpus, world_size):
    variants = RESUMED[world_size]
    run_distributed(unbroken_and_resumed, world_size, str(tmp_path), corpus, variants, timeout=300, init_group=False)
    for name in variants:
        whole = tmp_path / name / "whole"
        check_rows(rows_of(whole))
        assert all(row.keys() >= set(TIMES) for row in read_metrics(whole / "metrics.jsonl"))
        for step in SAVES[world_size]:
            check_equal(whole, tmp_path / name / f"saved{step}")
        stopped = tmp_path / name / "stopped"
        check_equal(whole, stopped)
        kept = sorted(path.name for path in (stopped / "checkpoints").glob("step_*"))
        assert kept == [f"step_{step:08d}" for step in (*STOPS[world_size], STEPS)]
        check_dormant_fusion(whole, [3, 6, 9, STEPS] if world_size > 1 else range(1, STEPS + 1))


def check_rows(rows):
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    passes = [row["passes"] for row in rows]
    assert passes[:SHARP_PHASE] == [1] * SHARP_PHASE and set(passes[SHARP_PHASE:]) == {1, 2, 3}
    assert passes.index(1, SHARP_PHASE) > min(passes.index(2), passes.index(3))
    assert [row["tokens"] for row in rows[:5]] == [64, 128, 192, 256, 384]
    for row in rows:
        needed = {"step", "passes", "loss", "grad_norm", "lr", "tokens", "skipped"}
        assert needed | {f"loss_pass_{k + 1}" for k in range(row["passes"])} <= row.keys()
        assert all(math.isfinite(value) for value in row.values()) and row["skipped"] == 0


def check_equal(whole, other):
    assert rows_of(other) == rows_of(whole)
    found, expected = checkpoint_of(other, STEPS), checkpoint_of(whole, STEPS)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    states = [(f / "checkpoints" / f"step_{STEPS:08d}" / "trainer_state.json").read_text() for f in (whole, other)]
    assert states[0] == states[1]
    for written in (other / "config.yaml", other / "checkpoints" / f"step_{STEPS:08d}" / "config.yaml"):
        assert load_yaml(str(written)).model.vocab_size == VOCAB
    status = json.loads((other / "status.json").read_text())
    last = {"state": "finished", "step": STEPS, "train_steps": STEPS, "last_checkpoint": f"step_{STEPS:08d}"}
    assert last.items() <= status.items() and status["loss"] == rows_of(other)[-1]["loss"]


def check_dormant_fusion(whole, saved):
    """Fusion weights: unchanged and without moments before the first multi-pass batch, then moved in every step."""
    passes = [row["passes"] for row in rows_of(whole)]
    first = next(step for step, count in enumerate(passes) if count > 1)
    at = {step: checkpoint_of(whole, step) for step in saved}
    fusion = [name for name in at[STEPS] if "fusion." in name]
    moments = 1 if any("momentum_buffer" in name for name in fusion) else 2
    masters = 1 if any(name.startswith("optimizer.master.") for name in at[STEPS]) else 0
    assert len(fusion) == 2 * (1 + masters + moments)
    for earlier, later in itertools.pairwise(saved):
        for name in fusion:
            before, after = at[earlier][name], at[later][name]
            if later <= first:
                moment = "exp_avg" in name or "momentum" in name
                assert torch.equal(before, after) and not (moment and after.any())
            else:
                assert not torch.equal(before, after), (name, later)
    state = json.loads((whole / "checkpoints" / f"step_{STEPS:08d}" / "trainer_state.json").read_text())
    assert state["updates"] == STEPS and state["fusion_updates"] == STEPS - first
