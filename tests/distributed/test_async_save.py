"""Checkpoints written while training goes on."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_distributed
from tests.distributed.run_case import STEPS, checkpoint_of, rows_of, run, run_config, write_corpus

ASYNC = {"checkpoint__async_save": True, "checkpoint__save_interval": 4, "checkpoint__keep_last": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


class Writer:
    """Holds back or breaks what ranks write in their threads.

    Args:
        fails: steps whose checkpoint rank 1 cannot write.
        slow: the thread copies late, and waits with writing until the run has made two steps more.
    """

    def __init__(self, rank, fails=(), slow=False):
        from megatron_fbt.core.checkpoint_write import PlannedSave
        from megatron_fbt.training.pending_save import Staging

        self.writes, self.write, self.copies, self.copy = PlannedSave, PlannedSave.write, Staging, Staging.copy
        self.rank, self.fails, self.slow = rank, fails, slow
        self.step, self.began, self.finished = 0, [], []

    def __enter__(self):
        def write(planned):
            began = self.step
            in_thread = threading.current_thread().name == "checkpoint"
            if in_thread and self.rank == 1 and began in self.fails:
                raise OSError(28, "No space left on device")
            deadline = time.monotonic() + 60
            while in_thread and self.slow and self.step < began + 2 and time.monotonic() < deadline:
                time.sleep(0.002)
            written = self.write(planned)
            self.began.append(began)
            self.finished.append(self.step)
            return written

        def copy(staging, *arguments):
            time.sleep(0.5 * self.slow)
            return self.copy(staging, *arguments)

        self.writes.write, self.copies.copy = write, copy
        return self

    def __exit__(self, *exception):
        self.writes.write, self.copies.copy = self.write, self.copy

    def __call__(self, trainer):
        self.step = trainer.state.step

        def after():
            self.step = trainer.state.step

        return after


def runs(rank, world_size, folder, corpus):
    found = {}
    settings = {"optimizer__sharding": "megatron", **ASYNC}
    at_once = {**settings, "checkpoint__async_save": False}
    assert run(run_config(Path(folder) / "plain", corpus, **at_once)) == "finished"
    with Writer(rank, slow=True) as writer:
        assert run(run_config(Path(folder) / "async", corpus, **settings), writer) == "finished"
    found["async"] = (writer.began, writer.finished)
    for failure in ("warn", "stop"):
        config = run_config(Path(folder) / failure, corpus, checkpoint__async_failure=failure, **settings)
        with Writer(rank, fails=(8,)) as writer:
            found[failure] = run(config, writer)
    found["resumed"] = run(config)
    return found


def test_training_goes_on_while_a_checkpoint_is_written_and_a_failure_reaches_all_ranks(tmp_path, corpus):
    results = run_distributed(runs, 2, str(tmp_path), corpus, timeout=300, init_group=False)
    for found in results:
        began, finished = found["async"]
        assert began == [4, 8, STEPS] and finished[0] >= 6 and finished[1] >= 10, "written two steps later"
        assert (found["warn"], found["stop"], found["resumed"]) == ("finished", "CheckpointError", "finished")
    plain = rows_of(tmp_path / "plain")
    for name in ("async", "warn", "stop"):
        assert rows_of(tmp_path / name) == plain
        kept = sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
        assert kept == ["latest", f"step_{4 if name == 'warn' else 8:08d}", f"step_{STEPS:08d}"], name
    for name, step in [("async", 8), ("async", STEPS), ("warn", STEPS), ("stop", 8), ("stop", STEPS)]:
        expected, found = checkpoint_of(tmp_path / "plain", step), checkpoint_of(tmp_path / name, step)
        assert [key for key in expected if not torch.equal(expected[key], found[key])] == [], (name, step)
        state = json.loads((tmp_path / name / "checkpoints" / f"step_{step:08d}" / "trainer_state.json").read_text())
        assert state["step"] == state["updates"] == step, "the state of the step at which the copy was made"
