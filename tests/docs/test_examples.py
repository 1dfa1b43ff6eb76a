"""Every shipped configuration and script is one that works and says what it is for."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fbt.pretrain import main

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "examples" / "configs").glob("**/*.yaml"))
SCRIPTS = sorted([*(ROOT / "examples").glob("**/*.sh"), *(ROOT / "tests").glob("*.sh"), ROOT / ".ci" / "run"])


@pytest.fixture
def dry_run(monkeypatch, capsys):
    """Standard output of the training command's dry run of a file, in this process: a start costs seconds."""

    def run(path, *flags):
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(ROOT)
        code = main(["--config", str(path.relative_to(ROOT)), "--dry_run", *flags])
        printed = capsys.readouterr()
        assert (code, printed.err) == (0, "")
        return printed.out

    return run


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_passes_a_dry_run(path, dry_run):
    plan = json.loads(dry_run(path, "--json"))
    sizes = [plan[f"{kind}_size"] for kind in ("tensor_model_parallel", "pipeline_model_parallel", "data_parallel")]
    assert plan["world_size"] == math.prod(sizes)
    assert plan["train_steps"] > 0 and plan["parameters"] > 0
    assert not [note for note in plan["notes"] if "training needs it" in note]
    table = dry_run(path)
    assert "token-equivalents" in table and f"{plan['parameters']:,}" in table


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_explains_itself(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert any(f"--config {path.relative_to(ROOT)}" in line for line in lines if line.startswith("#"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert re.match(r"#!/usr/bin/env bash$", lines[0]) and lines[1].startswith("# ")
    result = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=20)
    assert result.returncode == 0, result.stderr
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck:
        command = [shellcheck, "--external-sources", "--severity", "warning", str(path)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stdout
