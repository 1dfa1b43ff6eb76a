"""A file system that fills up while a run saves, and one that cannot be written."""

import json
import os
import subprocess
import sys

import pytest

from megatron_fbt.config.load import dump_yaml
from tests.distributed.run_case import STEPS, checkpoint_of, rows_of, run_config, write_corpus

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
(Path(run) / "filler").write_bytes(bytes((4 << 20) - (450 << 10)))


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
def test_a_full_disk_ends_the_run_with_path_and_sizes_and_leaves_the_checkpoint_before(tmp_path, repository):
    corpus = write_corpus(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    small_disk = ["unshare", "--map-root-user", "--mount"]
    mount = subprocess.run([*small_disk, "mount", "-t", "tmpfs", "tmpfs", run], capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mount.stderr.strip()}")
    config = run_config(run, corpus, checkpoint__save_interval=4)
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    for name, text in (("script.py", SCRIPT), ("train.py", TRAIN)):
        (tmp_path / name).write_text(text)
    names = [str(tmp_path / name) for name in ("script.py", "train.py", "config.yaml", "run", "copy")]
    command = [*small_disk, sys.executable, *names]
    environment = {**os.environ, "PYTHONPATH": str(repository), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    full, freed = json.loads(done.stdout.splitlines()[-1])
    assert full == [4, ["latest", "step_00000004"], "step_00000004"]
    assert f"cannot write the checkpoint {run}/checkpoints/.step_00000008." in done.stderr
    assert "No space left on device" in done.stderr and "free there" in done.stderr, done.stderr
    assert freed == [0, ["latest", "step_00000004", "step_00000008", f"step_{STEPS:08d}"], f"step_{STEPS:08d}"]
    assert len(rows_of(tmp_path / "copy")) == STEPS
    assert checkpoint_of(tmp_path / "copy", STEPS)
