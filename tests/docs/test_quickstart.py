"""examples/quickstart.sh as a newcomer runs it; only the installation is left out."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

TIMEOUT_S = 2400
STAND_IN = """#!/bin/sh
# The environment of the tests, with everything already installed.
if [ "$1" = -m ] && [ "$2" = pip ]; then exit 0; fi
PYTHONPATH='{root}' exec '{python}' "$@"
"""
METRICS = {"step", "passes", "loss", "loss_pass_1", "grad_norm", "lr", "tokens", "tokens_per_second", "skipped"}


def environment(folder: Path, root: Path) -> dict:
    """Variables of a shell in whose active virtual environment installing does nothing."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN.format(root=root, python=sys.executable))
    python.chmod(0o755)
    unwanted = ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in unwanted} | {"VIRTUAL_ENV": str(folder)}


def run_example(repository: Path, tmp_path: Path, script: str, folder: Path, timeout_s: float) -> str:
    """Everything that a script of examples/ prints, with its results in a folder."""
    log = tmp_path / "output.log"
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            ["bash", f"examples/{script}", str(folder)],
            cwd=repository,
            env=environment(tmp_path / "environment", repository),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(timeout_s)
        finally:
            process.terminate()  # lets the script hand a stop on to the training runs
            process.wait()
    printed = log.read_text(encoding="utf-8", errors="replace")
    assert code == 0, printed[-6000:]
    return printed


@pytest.mark.slow
def test_quickstart(repository, tmp_path):
    folder = tmp_path / "quickstart"
    printed = run_example(repository, tmp_path, "quickstart.sh", folder, TIMEOUT_S)
    steps = yaml.safe_load((repository / "examples/configs/tiny_cpu.yaml").read_text())["training"]["train_steps"]

    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert {row["passes"] for row in rows} == {1, 2, 3}
    assert all(METRICS <= set(row) for row in rows)
    assert json.loads((folder / "run" / "status.json").read_text())["state"] == "finished"

    stopped = int(re.search(r"stopped after step (\d+) with exit code 75", printed)[1])
    assert 0 < stopped < steps
    assert f"resuming from {folder}/run/checkpoints/step_{stopped:08d} (step {stopped})" in printed

    entropy = float(re.search(r"unigram entropy of the corpus: ([\d.]+) nats per token", printed)[1])
    final = [rows[-1][f"validation_loss_pass_{k}"] for k in (1, 2, 3)]
    assert max(final) <= entropy - 0.5
    final.append(rows[-1]["validation_loss_soft"])
    assert re.search(rf"^ +{steps}" + "".join(f" +{loss:.4f}" for loss in final) + "  ", printed, re.MULTILINE)

    corpus_bytes = int(re.search(r"text_bytes: ([\d,]+)", printed)[1].replace(",", ""))
    assert corpus_bytes >= 10_000_000
    for regime in ("standard", "soft", "fused"):
        assert re.search(rf"^--- {regime}\ndef read_lines\(path\):.*\S", printed, re.MULTILINE), regime
        assert re.search(rf"^{regime}: \d+ tokens in", printed, re.MULTILINE), regime
    assert (folder / "export" / "model.safetensors").is_file()
    assert "tensorboard --logdir" in printed
    assert re.search(r"^== \[\d+ s\] done$", printed, re.MULTILINE)
