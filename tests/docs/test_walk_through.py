"""The README's way from text to text, command by command, and what it says about the run folder."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from tests.docs import readme

TIMEOUT_S = 900


def run(line, folder):
    """Run a command line of the README; one that takes too long is ended with its workers."""
    arguments = shlex.split(line)
    arguments[:1] = [sys.executable] if arguments[0] == "python" else arguments[:1]
    process = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.terminate()
        process.wait()
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def documented_files():
    """Entries of the README's picture of a run folder, without those in the checkpoint's own line."""
    (block,) = (block for block in readme.blocks("text") if block.startswith("<run.dir>/"))
    return [line.split()[0].rstrip("/") for line in block.splitlines()[1:]]


def check_run_folder(folder):
    names = documented_files()
    parts = {"latest", next(name for name in names if name.startswith("step_"))}
    assert {path.name for path in folder.iterdir()} == set(names) - parts
    checkpoints = folder / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"latest", "step_00000020"}
    assert (checkpoints / "latest").read_text().strip() == "step_00000020"
    assert {"config.yaml", "trainer_state.json"} <= {path.name for path in (checkpoints / "step_00000020").iterdir()}


def spellings(name):
    """How a page may name a field: as it is, for its first number, without what validation puts before it."""
    plain = name.removeprefix("validation_")
    return {re.sub(r"_\d+$", number, form) for form in (name, plain) for number in ("_1", "_2")} | {name, plain}


def check_metrics(folder):
    table = {name for cell in readme.table("What a run writes", "field") for name in re.findall(r"`(\w+)`", cell)}
    page = set(readme.code_words(readme.pages()["docs/run_folder.md"]))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 21))
    found = {name for row in rows for name in row}
    assert table - found == {"z_loss", "rewinds", "loss_scale"}, "what the table has with other settings only"
    assert [name for name in found if not spellings(name) & page] == []
    assert [row["step"] for row in rows if "validation_loss_pass_1" in row] == [20]
    assert [row["tokens"] for row in rows] == [row["step"] * rows[0]["tokens"] for row in rows]
    equivalents = [rows[0]["tokens"] * sum(row["passes"] for row in rows[: i + 1]) for i in range(20)]
    assert [row["token_equivalents"] for row in rows] == equivalents


def check_status(folder):
    status = json.loads((folder / "status.json").read_text())
    text = readme.section("Status")
    assert [name for name in status if f"`{name}`" not in text] == []
    assert (status["state"], status["last_checkpoint"]) == ("finished", "step_00000020")


@pytest.mark.slow
def test_walk_through(repository, tmp_path):
    for name in ("megatron_fbt", "tools", "examples"):
        (tmp_path / name).symlink_to(repository / name)
    lines = [line for line in readme.command_lines() if "runs/demo" in line]
    assert len(lines) == 5
    for line in lines:
        result = run(line, tmp_path)
        assert result.returncode == 0, f"{line}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    assert result.stdout.strip("\n")
    folder = tmp_path / "runs" / "demo" / "run"
    check_run_folder(folder)
    check_metrics(folder)
    check_status(folder)
    again = run(lines[2], tmp_path)
    assert again.returncode == 0 and "nothing to do" in again.stdout

    python_block = readme.blocks("python")[0].replace("runs/quickstart/export", "runs/demo/export")
    generated = subprocess.run(
        [sys.executable, "-c", python_block], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert generated.returncode == 0, generated.stderr[-4000:]
    assert generated.stdout.startswith("import os")
