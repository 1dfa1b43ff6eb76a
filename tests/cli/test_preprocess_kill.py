"""Preprocessing killed at any moment goes on where it was, and ends with the bytes of an unbroken run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fbt.data.tokenizer_training import TokenizerTraining, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
INSTANTS = 20
SLOW = (0, 7, 12, 19)
"""Of these, the rest are for tests/run.sh --soak."""
SHARDS = 5


def start(corpus, output):
    """The command with 4 workers, in a process group of its own."""
    tool = str(ROOT / "tools" / "preprocess_data.py")
    command = [sys.executable, tool, "--input", str(corpus / "in"), "--output", str(output / "x"), "--workers", "4"]
    command += ["--tokenizer_path", str(corpus / "t.model"), "--shards", str(SHARDS), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, start_new_session=True, text=True, **pipes)


def finish(process):
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    return json.loads(out)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Text of some seconds' work, a tokenizer, and what an unbroken run makes of it."""
    folder = tmp_path_factory.mktemp("kill")
    sources = [path.read_text("utf-8") for path in sorted((ROOT / "megatron_fbt").glob("**/*.py"))]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in sources]
    (folder / "in").mkdir()
    for i in range(2 * SHARDS):
        repeated = [json.dumps({"text": f"{i} {j}"}).encode() + b"\n" for j in range(500)]
        (folder / "in" / f"{i}.jsonl").write_bytes(b"".join(lines[i::4] + repeated))
    (folder / "some.jsonl").write_bytes(b"".join(lines[:40]))
    train_tokenizer(TokenizerTraining([str(folder / "some.jsonl")], str(folder / "t"), 1000))
    assert finish(start(folder, folder / "whole"))["shards"] == {"made": SHARDS, "kept": 0, "of": SHARDS}
    return folder


def written(folder):
    """Bytes of tokens in a folder whose files come and go."""
    size = 0
    for name in os.listdir(folder) if folder.exists() else []:
        if ".bin" in name:
            try:
                size += os.path.getsize(folder / name)
            except FileNotFoundError:
                pass
    return size


@pytest.mark.parametrize(
    "instant", [pytest.param(i, marks=pytest.mark.slow if i in SLOW else pytest.mark.soak) for i in range(INSTANTS)]
)
def test_a_killed_run_goes_on_and_gives_the_same_bytes(corpus, tmp_path, instant):
    expected, output = contents(corpus / "whole"), tmp_path / "out"
    total = sum(len(content) for name, content in expected.items() if name.endswith(".bin"))
    process = start(corpus, output)
    while written(output) < total * instant / INSTANTS or (instant and not output.exists()):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.001)
    if instant == 0:
        time.sleep(0.7)  # while the workers start
    if instant % 2:
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (output / "x.manifest.json").exists() or contents(output) == expected
    complete = len(list(output.glob("x-*.shard.json"))) if output.exists() else 0
    report = finish(start(corpus, output))
    assert report["shards"] == {"made": SHARDS - complete, "kept": complete, "of": SHARDS}
    assert contents(output) == expected
