"""Every shipped configuration and script is one that works and says what it is for."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fbt.config.load import load_yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "examples").glob("**/*.yaml"))
SCRIPTS = sorted([*(ROOT / "examples").glob("**/*.sh"), *(ROOT / "tests").glob("*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_passes_a_dry_run(path):
    command = [sys.executable, "-m", "megatron_fbt.pretrain", "--config", str(path), "--dry_run", "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    plan, config = json.loads(result.stdout), load_yaml(str(path))
    assert plan["world_size"] % config.parallel.model_parallel_size == 0
    assert plan["train_steps"] > 0 and plan["parameters"] > 0
    assert not [note for note in plan["notes"] if "training needs it" in note]


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
