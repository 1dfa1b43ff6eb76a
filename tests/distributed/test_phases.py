"""Time limits: phases that are slow by nature have longer ones than a step, and each of them ends."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import DistributedFailure, run_distributed
from tests.distributed.run_case import rows_of, run, run_config, write_corpus

PHASES = {"data": "parallel__data_timeout_s", "load": "parallel__load_timeout_s", "save": "parallel__save_timeout_s"}


def limits_of_groups(rank, world_size):
    from megatron_fbt.config.parallel import ParallelConfig
    from megatron_fbt.core.parallel import initialize_parallel
    from megatron_fbt.core.phases import phase

    config = ParallelConfig(tensor_model_parallel_size=2, collective_timeout_s=5)
    layout = initialize_parallel(config, seed=1)

    def meet(group, late_s):
        time.sleep(late_s if rank == 1 else 0)
        dist.all_reduce(torch.zeros(1), group=group)

    with pytest.raises(ZeroDivisionError), phase(config, layout, 60):
        meet(None, 7)
        meet(layout.batch_group, 7)
        1 / 0  # noqa: B018
    meet(None, 60)


def test_groups_wait_longer_in_a_phase_and_not_after_it():
    began = time.monotonic()
    with pytest.raises(DistributedFailure, match=r"Timed out(.|\n)*ranks \[1\]: stopped"):
        run_distributed(limits_of_groups, 2, timeout=100, init_group=False)
    assert time.monotonic() - began < 60


class Slow:
    """Rank 1 is late in a phase.

    Args:
        name: of the phase; None = in a step.
        seconds: by so much.
    """

    def __init__(self, name, seconds):
        from megatron_fbt.core import checkpoint_write
        from megatron_fbt.training import checkpoint, session, trainer

        self.seconds = seconds
        places = {
            "data": (session, "build_datasets"),
            "load": (checkpoint, "read_pieces"),
            "save": (checkpoint_write.PlannedSave, "write"),
            None: (trainer, "run_passes"),
        }
        self.place, self.attribute = places[name]
        self.plain = getattr(self.place, self.attribute)

    def __enter__(self):
        def late(*arguments, **options):
            if os.environ["RANK"] == "1":
                time.sleep(self.seconds)
            return self.plain(*arguments, **options)

        setattr(self.place, self.attribute, late)

    def __exit__(self, *exception):
        setattr(self.place, self.attribute, self.plain)


def configured(folder, corpus, step_s, phase_s):
    limits = {name: phase_s for name in PHASES.values()}
    settings = {**limits, "parallel__collective_timeout_s": step_s, "training__train_steps": 3}
    return run_config(Path(folder) / "run", corpus, optimizer__lr_warmup_steps=0, **settings)


def slow_runs(rank, world_size, folder, corpus, name, step_s, phase_s, seconds):
    config = configured(folder, corpus, step_s, phase_s)
    if name == "load":
        config.training.train_steps = 2
        assert run(config) == "finished"
        config.training.train_steps = 3
    with Slow(name, seconds):
        return run(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", PHASES)
def test_a_phase_may_take_longer_than_a_step(tmp_path, name):
    case = (str(tmp_path), write_corpus(tmp_path), name, 15, 120, 20)
    assert run_distributed(slow_runs, 2, *case, timeout=250, init_group=False) == ["finished"] * 2
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PHASES, None])
def test_a_hang_in_every_phase_and_in_a_step_ends_the_run(tmp_path, name):
    step_s, phase_s = (60, 15) if name else (15, 60)
    corpus, began = write_corpus(tmp_path), time.monotonic()
    with pytest.raises(DistributedFailure, match="Timed out|timed out|[Tt]imeout"):
        run_distributed(
            slow_runs, 2, str(tmp_path), corpus, name, step_s, phase_s, 10_000, timeout=250, init_group=False
        )
    assert time.monotonic() - began < 200
