"""tools/inspect_checkpoint.py and tools/verify_checkpoint.py."""

import importlib.util
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.manifest import HASH, hash_file
from megatron_fbt.training.checkpoint_folder import CheckpointFolder
from megatron_fbt.training.run_folder import TrainerState


@pytest.fixture
def tool(repository, capsys):
    """Runs a tool in this process: (exit code, output, errors)."""

    def run(name, *arguments):
        spec = importlib.util.spec_from_file_location(name, repository / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        code = module.main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture
def checkpoint(tmp_path):
    """A run folder with a whole checkpoint of step 4 and its tensors."""
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints", PretrainConfig().checkpoint)
    temporary = folder.make_room(4)
    tensors = {"decoder.weight": torch.arange(6.0).view(2, 3), "output.weight": torch.ones(5, dtype=torch.bfloat16)}
    tensors |= {f"optimizer.exp_avg.{name}": torch.zeros(value.shape) for name, value in tensors.items()}
    writer = torch_checkpoint.FileSystemWriter(str(temporary), single_file_per_rank=True)
    torch_checkpoint.save(tensors, storage_writer=writer, no_dist=True)
    files = {path.name: hash_file(path) for path in temporary.iterdir()}
    state = TrainerState(step=4, consumed_samples=32, pass_counts=[3, 1])
    facts = {"layout": {"tensor": 2, "pipeline": 1, "data": 4}, "validation_loss": 3.25}
    return folder.publish(temporary, state, dump_yaml(PretrainConfig()), files, facts)


def test_a_checkpoint_is_described(tool, checkpoint):
    code, shown, _ = tool("inspect_checkpoint", "--checkpoint", checkpoint.parent.parent, "--json")
    facts = json.loads(shown)
    expected = {
        "step": 4,
        "tokens": 32 * 1024,
        "parameters": 11,
        "number_formats": ["bfloat16", "float32"],
        "tensors": 4,
        "layout": {"tensor": 2, "pipeline": 1, "data": 4},
        "validation_loss": 3.25,
        "bytes": sum(path.stat().st_size for path in checkpoint.iterdir() if path.name != "manifest.json"),
        "files": len(list(checkpoint.iterdir())),
    }
    assert code == 0 and expected.items() <= facts.items()
    code, shown, _ = tool("inspect_checkpoint", "--checkpoint", checkpoint, "--config")
    assert code == 0 and "tensor 2, pipeline 1, data 4" in shown and "micro_batch_size: 1" in shown


def test_an_intact_checkpoint_is_verified(tool, checkpoint):
    assert tool("verify_checkpoint", "--checkpoint", checkpoint.parent.parent) == (0, f"{checkpoint}: intact\n", "")


@pytest.mark.parametrize("damage", ["gone", "half", "empty", "flipped"])
def test_every_damaged_file_is_named(tool, checkpoint, damage):
    for path in sorted(checkpoint.iterdir()):
        content = path.read_bytes()
        if damage == "gone":
            path.unlink()
        elif damage == "flipped":
            path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        else:
            os.truncate(path, len(content) // 2 if damage == "half" else 0)
        code, shown, _ = tool("verify_checkpoint", "--checkpoint", checkpoint.parent, "--all", "--json")
        (problems,) = json.loads(shown)["checkpoints"].values()
        assert code == 4, path.name
        if not (damage == "flipped" and path.name == "manifest.json"):  # names the file whose hash was changed
            assert problems[0].startswith(f"{path} ") and len(problems) == 1, problems
        path.write_bytes(content)
    assert tool("verify_checkpoint", "--checkpoint", checkpoint)[0] == 0


def test_a_strange_file_is_told_of_and_nothing_is_executed(tool, checkpoint, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "proof"),)

    (checkpoint / "extra").write_text("")
    code, shown, _ = tool("verify_checkpoint", "--checkpoint", checkpoint)
    assert code == 4 and f"{checkpoint / 'extra'} is not in manifest.json" in shown
    (checkpoint / "extra").unlink()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Trap()))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    entry = hash_file(checkpoint / ".metadata")
    manifest["files"][".metadata"] = {"bytes": entry.size, HASH: entry.digest}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    for name in ("inspect_checkpoint", "verify_checkpoint"):
        code, shown, errors = tool(name, "--checkpoint", checkpoint)
        assert code == 4 and "mkdir does not belong into an index" in shown + errors
    assert not (tmp_path / "proof").exists()


def test_no_checkpoint_is_exit_code_4(tool, tmp_path):
    for name in ("inspect_checkpoint", "verify_checkpoint"):
        code, _, errors = tool(name, "--checkpoint", tmp_path)
        assert code == 4 and f"checkpoint {tmp_path}" in errors


HOSTILE = {
    "manifest.json": [
        "",
        "[]",
        "null",
        "7",
        '"text"',
        '{"format": 1, "files": []}',
        '{"format": 2, "files": {}}',
        "\x00\xff",
    ],
    "config.yaml": ["", "- 1", "a: [", "model: 3", "\x00"],
    "trainer_state.json": ["", "[]", "null", '{"unknown": 1}', '{"step": "four"}', "{"],
    ".metadata": ["", "text", "\x80\x04."],
}
"""Content that a person or a program may have put there."""


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_a_small_file_holds_the_tools_say_so_in_one_line(tool, checkpoint, name):
    for content in HOSTILE[name]:
        (checkpoint / name).write_text(content, encoding="latin-1")
        if name != "manifest.json":  # as if it had been written so
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            entry = hash_file(checkpoint / name)
            manifest["files"][name] = {"bytes": entry.size, HASH: entry.digest}
            (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        for tool_name in ("inspect_checkpoint", "verify_checkpoint"):
            code, shown, errors = tool(tool_name, "--checkpoint", checkpoint)
            assert code == 4 and str(checkpoint / name) in shown + errors, (tool_name, content)
            assert "Traceback" not in shown + errors and len((shown + errors).splitlines()) <= 3


@pytest.mark.parametrize("content", ["", "../elsewhere", "step_00000009", "/etc", "\x00", "a" * 5000])
def test_a_tracker_with_anything_else_than_a_checkpoint_is_exit_code_4(tool, checkpoint, content):
    (checkpoint.parent / "latest").write_text(content)
    for tool_name in ("inspect_checkpoint", "verify_checkpoint"):
        code, _, errors = tool(tool_name, "--checkpoint", checkpoint.parent.parent)
        assert code == 4 and str(checkpoint.parent / "latest") in errors and len(errors) < 1500


def test_a_file_or_a_damaged_one_among_several_is_told(tool, checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    for tool_name in ("inspect_checkpoint", "verify_checkpoint"):
        assert tool(tool_name, "--checkpoint", tmp_path / "file")[0] == 4
    code, _, errors = tool("verify_checkpoint", "--checkpoint", tmp_path / "nowhere", "--all")
    assert code == 4 and "nowhere" in errors
    (checkpoint.parent / "step_00000002").mkdir()
    code, shown, _ = tool("verify_checkpoint", "--checkpoint", checkpoint.parent.parent, "--all", "--json")
    told = json.loads(shown)
    assert code == 4 and not told["intact"] and told["checkpoints"][str(checkpoint)] == []
    assert "manifest.json cannot be read" in told["checkpoints"][str(checkpoint.parent / "step_00000002")][0]


@pytest.mark.parametrize("name", ["inspect_checkpoint", "verify_checkpoint"])
def test_a_reader_that_leaves_first_gets_no_traceback(repository, checkpoint, name):
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, str(repository / "tools" / f"{name}.py"), "--checkpoint", str(checkpoint)]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    ended = subprocess.run(command, env=environment, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert ended.stderr == ""
