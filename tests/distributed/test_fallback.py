"""Runs whose newest checkpoint is not what was written, or would execute code; a second run in the same folder."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from megatron_fbt.core.manifest import HASH, hash_file
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
    manifest["files"][".metadata"] = {"bytes": entry.size, HASH: entry.digest}
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


DAMAGES = ("gone", "half", "empty", "byte")


def damage_each_file(rank, world_size, folder, corpus):
    """Every file of the newest checkpoint in turn, in every way; what came of each resume."""
    place = Path(folder)
    settings = {"training__train_steps": 4, "optimizer__lr_warmup_steps": 0, "checkpoint__save_interval": 1}
    config = run_config(place / "whole", corpus, optimizer__sharding="megatron", **settings)
    assert run(config) == "finished"
    newest = Path("checkpoints") / "step_00000003"
    names, found = sorted(path.name for path in (place / "whole" / newest).iterdir()), {}
    for name in names:
        for damage in DAMAGES:
            case = place / f"{name} {damage}"
            if rank == 0:
                branch(place / "whole", place / "draft", 3)
                spoil(place / "draft" / newest / name, damage)
                (place / "draft").rename(case)
            wait_for(case)
            config.run.dir = str(case)
            found[name, damage] = run(config)
    return found


def spoil(path, damage):
    if damage == "gone":
        path.unlink()
    elif damage == "byte":
        change_a_byte(path)
    else:
        os.truncate(path, path.stat().st_size // 2 if damage == "half" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_after_damage_to_any_file_a_run_goes_on_from_the_checkpoint_before(tmp_path, world_size, capfd):
    case = (str(tmp_path), write_corpus(tmp_path))
    results = run_distributed(damage_each_file, world_size, *case, timeout=1500, init_group=False)
    shown = capfd.readouterr().out
    names = {name for name, _ in results[0]}
    assert {".metadata", "manifest.json", "config.yaml", "trainer_state.json", f"__{world_size - 1}_0.distcp"} <= names
    for found in results:
        assert set(found.values()) == {"finished"} and len(found) == len(DAMAGES) * len(names)
    expected, rows = checkpoint_of(tmp_path / "whole", 4), rows_of(tmp_path / "whole")
    for name, damage in results[0]:
        case = tmp_path / f"{name} {damage}"
        values = checkpoint_of(case, 4)
        assert [key for key in expected if not torch.equal(expected[key], values[key])] == [], case.name
        assert rows_of(case) == rows, case.name
        told = "going back to step_00000002" in shown.partition(f"{case}/checkpoints/step_00000003")[2][:3000]
        assert told or name == "manifest.json", "a byte of it may be one that says when it was written"
