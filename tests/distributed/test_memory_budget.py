"""Runs under memory.budget_gib: what is computed again follows from it, and changes nothing else."""

from pathlib import Path

import pytest
import torch

from megatron_fbt.config.load import load_yaml
from megatron_fbt.config.memory import RecomputePolicy
from megatron_fbt.config.plan import make_plan
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import VOCAB, checkpoint_of, rows_of, run, run_config, stop_before, write_corpus

LENGTH = {"training__train_steps": 8, "training__rampup_batch_size": None}


def small_budget(config):
    """A budget that only recomputing every pass keeps to, in GiB."""
    options = make_plan(config, 1, VOCAB).recompute_options
    sizes = sorted(option.total for option in options)
    return (sizes[0] + sizes[1]) / 2 / 2**30


def watched(policies, step=None):
    """Notes the policy of each step; stops before a step if one is given."""
    stop = None if step is None else stop_before(step)

    def before(trainer):
        policies.append(trainer.stage.memory.policy)
        return stop and stop(trainer)

    return before


def budget_runs(rank, world_size, folder, corpus):
    place, found = Path(folder), {"plain": [], "budget": [], "resumed": []}
    assert run(run_config(place / "plain", corpus, **LENGTH), watched(found["plain"])) == "finished"
    config = run_config(place / "budget", corpus, **LENGTH)
    config.memory.budget_gib = small_budget(config)
    assert run(config, watched(found["budget"], 7)) == "StoppedBySignal"
    config.memory.budget_gib = 100.0
    assert run(config, watched(found["resumed"])) == "finished"
    nothing = run_config(place / "nothing", corpus, **LENGTH, memory__budget_gib=1e-6)
    assert run(nothing) == "ConfigError" and not list((place / "nothing").glob("checkpoints/*"))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget")
    (found,) = run_distributed(budget_runs, 1, str(folder), write_corpus(folder), timeout=300, init_group=False)
    return folder, found


def test_a_run_computes_again_what_its_budget_says_and_a_resume_chooses_anew(runs):
    _, found = runs
    assert set(found["plain"]) == set(found["resumed"]) == {RecomputePolicy()}
    assert set(found["budget"]) == {RecomputePolicy("full", "all")}
    assert len(found["budget"]) + len(found["resumed"]) >= len(found["plain"]) == 8


def test_its_numbers_are_those_of_keeping_everything(runs):
    folder, _ = runs
    assert max(row["passes"] for row in rows_of(folder / "plain")) > 1
    losses = [[row["loss"] for row in rows_of(folder / name)] for name in ("plain", "budget")]
    assert losses[0] == losses[1]
    plain, budget = (checkpoint_of(folder / name, 8) for name in ("plain", "budget"))
    assert [name for name in plain if not torch.equal(plain[name], budget[name])] == []


def test_a_checkpoint_holds_the_budget_not_the_choice(runs):
    folder, _ = runs
    memory = load_yaml(folder / "budget" / "checkpoints" / "step_00000008" / "config.yaml").memory
    assert (memory.budget_gib, memory.recompute, memory.recompute_passes) == (100.0, "none", "all")
