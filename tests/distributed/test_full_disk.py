"""A file system that fills up while a run saves, and one that cannot be written."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_fbt.config.load import dump_yaml
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import STEPS, checkpoint_of, rows_of, run, run_config, write_corpus

TRAIN = """
import sys
from megatron_fbt import pretrain
from tests.distributed.run_case import VOCAB
from tests.unit.data.corpus import PlainTokenizer
pretrain.run_tokenizer = lambda config: PlainTokenizer(VOCAB)
sys.exit(pretrain.main(["--config", sys.argv[1]]))
"""
SCRIPT = """
import json, subprocess, sys
from pathlib import Path

train, config, run, copy = sys.argv[1:]
folder = Path(run) / "checkpoints"
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", run], check=True)
(Path(run) / "filler").write_bytes(bytes((4 << 20) - (320 << 10)))


def outcome():
    code = subprocess.run([sys.executable, train, config]).returncode
    return code, sorted(path.name for path in folder.iterdir()), (folder / "latest").read_text().strip()


found = [outcome()]
(Path(run) / "filler").unlink()
found.append(outcome())
subprocess.run(["cp", "-r", run, copy], check=True)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_ends_the_run_with_path_and_sizes_and_leaves_the_checkpoint_before(
    tmp_path, repository, background
):
    corpus = write_corpus(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    small_disk = ["unshare", "--map-root-user", "--mount"]
    mount = subprocess.run([*small_disk, "mount", "-t", "tmpfs", "tmpfs", run], capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mount.stderr.strip()}")
    config = run_config(run, corpus, checkpoint__save_interval=4, checkpoint__async_save=background)
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    for name, text in (("script.py", SCRIPT), ("train.py", TRAIN)):
        (tmp_path / name).write_text(text)
    names = [str(tmp_path / name) for name in ("script.py", "train.py", "config.yaml", "run", "copy")]
    command = [*small_disk, sys.executable, *names]
    environment = {**os.environ, "PYTHONPATH": str(repository), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    full, freed = json.loads(done.stdout.splitlines()[-1])
    assert full == [4, ["latest", "step_00000004"], "step_00000004"], done.stderr
    assert f"cannot write the checkpoint {run}/checkpoints/.step_00000008." in done.stderr
    assert "No space left on device" in done.stderr and "free there" in done.stderr, done.stderr
    assert freed == [0, ["latest", "step_00000004", "step_00000008", f"step_{STEPS:08d}"], f"step_{STEPS:08d}"]
    assert len(rows_of(tmp_path / "copy")) == STEPS
    assert checkpoint_of(tmp_path / "copy", STEPS)


def test_a_folder_that_cannot_be_written_is_an_error_with_its_path(tmp_path, repository):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o555)
    (tmp_path / "config.yaml").write_text(dump_yaml(run_config(folder, write_corpus(tmp_path))))
    (tmp_path / "train.py").write_text(TRAIN)
    as_others = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    command = [*as_others, sys.executable, tmp_path / "train.py", tmp_path / "config.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(repository), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f"run.dir = {str(folder)!r}: may not be written; change its permissions" in done.stderr
    assert not list(folder.iterdir())


LIMIT = 20_000
"""Bytes to which a file of rank 1 may grow; its part of a checkpoint is larger."""


def runs_at_a_limit(rank, world_size, folder, corpus):
    """The operating system refuses what rank 1 writes from step 8 on; then it does so no more."""
    settings = {"optimizer__sharding": "megatron", "checkpoint__save_interval": 4}
    assert run(run_config(Path(folder) / "whole", corpus, **settings)) == "finished"
    outcomes, free = {}, resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_up(trainer):
        if rank == 1 and trainer.state.step == 7:
            while trainer.checkpointer.busy:  # with the checkpoint of step 4
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, free[1]))

    for name, background in (("at once", False), ("background", True)):
        config = run_config(Path(folder) / name, corpus, checkpoint__async_save=background, **settings)
        left = [run(config, fill_up), sorted(path.name for path in (Path(config.run.dir) / "checkpoints").iterdir())]
        resource.setrlimit(resource.RLIMIT_FSIZE, free)
        outcomes[name] = [*left, run(config)]
    return outcomes


def test_a_rank_that_can_write_no_more_ends_the_run_and_the_checkpoint_before_stays(tmp_path, capfd):
    corpus = write_corpus(tmp_path)
    for outcomes in run_distributed(runs_at_a_limit, 2, str(tmp_path), corpus, timeout=300, init_group=False):
        for name in ("at once", "background"):
            assert outcomes[name] == ["CheckpointError", ["latest", "step_00000004"], "finished"]
    shown = capfd.readouterr().out
    for name in ("at once", "background"):
        assert f"cannot write the checkpoint {tmp_path / name}/checkpoints/.step_00000008." in shown
        assert rows_of(tmp_path / name) == rows_of(tmp_path / "whole")
        expected, found = checkpoint_of(tmp_path / "whole", STEPS), checkpoint_of(tmp_path / name, STEPS)
        assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    assert "File too large" in shown and "this process writes" in shown and "free there" in shown
