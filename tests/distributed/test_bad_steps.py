"""Spikes are skipped by all ranks and told of; weights that are not finite are never written; other ways to stop."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_distributed
from tests.distributed.run_case import STEPS, checkpoint_of, rows_of, run, run_config, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def larger_gradient(steps, factor):
    """Multiply the gradient of one rank in these steps (counted from 1)."""
    from megatron_fbt.training import buffer_optimizer

    plain = buffer_optimizer.reduce_gradients
    at = {"step": 0}

    def reduce_gradients(model):
        if at["step"] in steps and int(os.environ["RANK"]) == 1:
            for param in model.module.parameters():
                param.main_grad.mul_(factor)
        return plain(model)

    buffer_optimizer.reduce_gradients = reduce_gradients

    def hook(trainer):
        at["step"] = trainer.state.step + 1

    return hook, lambda: setattr(buffer_optimizer, "reduce_gradients", plain)


def spoil_weight_before_save(trainer):
    if trainer.state.step == 2 and int(os.environ["RANK"]) == 1:
        return lambda: trainer.stage.decoder.final_layernorm.weight.data.fill_(float("inf"))


def wait_for_limit(trainer):
    if trainer.state.step == 3:
        trainer.config.run.dir and (Path(trainer.config.run.dir) / "stop").touch()


def bad_runs(rank, world_size, folder, corpus):
    place = Path(folder)
    spikes = {"training__spikes": spike_config()}
    hook, undo = larger_gradient((5, 8), 1000.0)
    assert run(run_config(place / "spikes", corpus, **spikes), hook) == "finished"
    undo()
    for name, background in (("inf", False), ("inf in the background", True)):
        config = run_config(place / name, corpus, checkpoint__save_interval=3, checkpoint__async_save=background)
        assert run(config, spoil_weight_before_save) == "BadNumbersError"
    config = run_config(place / "file", corpus)
    assert run(config, wait_for_limit) == "StoppedBySignal"
    assert run(config) == "finished"
    limited = run_config(place / "clock", corpus, training__wall_clock_limit_s=0.01)
    assert run(limited) == "StoppedBySignal"


def spike_config():
    from megatron_fbt.config.training import SpikeConfig

    return SpikeConfig(window=3, grad_norm_factor=50.0)


def test_spikes_bad_weights_and_other_ways_to_stop(tmp_path, corpus):
    run_distributed(bad_runs, 2, str(tmp_path), corpus, timeout=300, init_group=False)
    rows = rows_of(tmp_path / "spikes")
    assert [row["skipped"] for row in rows] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    told = [json.loads(line) for line in (tmp_path / "spikes" / "skipped.jsonl").read_text().splitlines()]
    assert [row["step"] for row in told] == [5, 8] and all("gradient norm" in row["reason"] for row in told)
    batches = {row["step"]: row["tokens"] // 16 for row in rows}  # rows read so far
    assert [(row["first_sample"], row["last_sample"]) for row in told] == [
        (batches[step - 1], batches[step] - 1) for step in (5, 8)
    ]
    state = json.loads((tmp_path / "spikes" / "checkpoints" / f"step_{STEPS:08d}" / "trainer_state.json").read_text())
    assert state["updates"] == STEPS - 2 and len(state["recent_losses"]) == 3
    assert all(torch.isfinite(value).all() for value in checkpoint_of(tmp_path / "spikes", STEPS).values())
    for name in ("inf", "inf in the background"):
        assert not list((tmp_path / name).glob("checkpoints/*")), "a weight was infinite on one rank"
    kept = sorted(path.name for path in (tmp_path / "file" / "checkpoints").glob("step_*"))
    assert kept == ["step_00000004", f"step_{STEPS:08d}"] and not (tmp_path / "file" / "stop").exists()
    assert [path.name for path in (tmp_path / "clock" / "checkpoints").glob("step_*")] == ["step_00000001"]
