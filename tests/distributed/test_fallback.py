"""Runs whose newest checkpoint is not what was written, or would execute code; a second run in the same folder."""

import json
import os
import pickle
from pathlib import Path

import torch

from megatron_fbt.core.manifest import hash_file
from megatron_fbt.training.lease import LEASE, Lease
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import STEPS, branch, checkpoint_of, rows_of, run, run_config, write_corpus


class Trap:
    """Makes a folder when it is read by pickle."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (self.proof,)


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def set_trap(checkpoint, proof):
    """An index that executes something, with a manifest that agrees to it."""
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Trap(str(proof))))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    entry = hash_file(checkpoint / ".metadata")
    manifest["files"][".metadata"] = {"bytes": entry.size, "sha256": entry.digest}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def damaged_runs(rank, world_size, folder, corpus):
    place = Path(folder)
    config = run_config(place / "whole", corpus, (1, 2), checkpoint__save_interval=4)
    assert run(config) == "finished"
    for name in ("byte", "trap", "cut", "held"):
        if rank == 0:
            branch(place / "whole", place / f"{name}-draft", 8)
            newest = place / f"{name}-draft" / "checkpoints" / "step_00000008"
            if name == "byte":
                change_a_byte(newest / "__1_0.distcp")
            elif name == "trap":
                set_trap(newest, place / "proof")
            elif name == "cut":
                os.truncate(newest / "__1_0.distcp", 100)
            (place / f"{name}-draft").rename(place / name)
        wait_for(place / name)
    outcomes = {}
    for name in ("byte", "trap", "cut"):
        config.run.dir = str(place / name)
        outcomes[name] = run(config)
    config.run.dir = str(place / "held")
    config.checkpoint.lease_seconds = 3.0
    other = Lease(place / "held", 3.0)
    if rank == 0:
        assert other.try_to_take() is None
    outcomes["held"] = run(config)
    other.release()
    return outcomes


def wait_for(path):
    import time

    while not path.exists():
        time.sleep(0.01)


def test_damaged_and_dangerous_checkpoints_are_left_for_the_one_before_and_a_held_folder_alone(tmp_path):
    corpus = write_corpus(tmp_path)
    for found in run_distributed(damaged_runs, 2, str(tmp_path), corpus, timeout=300, init_group=False):
        assert found == {"byte": "finished", "trap": "finished", "cut": "finished", "held": "CheckpointError"}
    assert not (tmp_path / "proof").exists()
    for name in ("byte", "trap", "cut"):
        assert rows_of(tmp_path / name) == rows_of(tmp_path / "whole")
        for step in (8, STEPS):
            expected, found = checkpoint_of(tmp_path / "whole", step), checkpoint_of(tmp_path / name, step)
            assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    held = tmp_path / "held"
    status = json.loads((held / "status.json").read_text())
    assert status["state"] == "finished" and not (held / LEASE).exists(), "the other run's folder is untouched"
    assert sorted(path.name for path in (held / "checkpoints").glob("step_*")) == ["step_00000004", "step_00000008"]
