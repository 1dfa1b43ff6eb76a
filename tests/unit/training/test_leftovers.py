"""Half-written files and checkpoints on their way out go, and nothing else does."""

import os

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.training.lease import LEASE, Lease
from megatron_fbt.training.leftovers import remove_drafts, tidy_up
from tests.unit.training.checkpoints import publish


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def finished_run(tmp_path):
    """A run folder as kills leave it, and its configuration."""
    publish(tmp_path, 4)
    checkpoints = tmp_path / "checkpoints"
    for folder in (".step_00000002.old.tmp", ".step_00000006.abcd.tmp"):
        (checkpoints / folder).mkdir()
        (checkpoints / folder / "__0_0.distcp").write_text("tensors")
    for draft in (checkpoints / ".latest.123.tmp", tmp_path / ".status.json.123.tmp"):
        draft.write_text("half")
    config = PretrainConfig()
    config.run.dir = str(tmp_path)
    return config


def test_a_finished_run_is_tidied_up(tmp_path):
    tidy_up(finished_run(tmp_path))
    assert names(tmp_path / "checkpoints") == ["latest", "step_00000004"] and names(tmp_path) == ["checkpoints"]


def test_while_another_run_is_at_work_nothing_goes(tmp_path):
    config = finished_run(tmp_path)
    other = Lease(tmp_path, 60.0)
    assert other.try_to_take() is None
    before = names(tmp_path / "checkpoints")
    tidy_up(config)
    assert names(tmp_path / "checkpoints") == before and (tmp_path / LEASE).exists()
    other.release()


def test_own_drafts_stay(tmp_path):
    own = tmp_path / f".lease.json.{os.getpid()}.tmp"
    own.write_text("being written")
    (tmp_path / ".metrics.jsonl.9.tmp").write_text("half")
    remove_drafts(tmp_path)
    assert names(tmp_path) == [own.name]
