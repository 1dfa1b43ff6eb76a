"""The benchmark of the loader runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import loader_speed

pytestmark = pytest.mark.slow


def test_a_quick_run():
    command = [sys.executable, Path(loader_speed.__file__), "--quick", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout)
    assert list(found["wait_s"]) == ["num_workers 0", "num_workers 1", "num_workers 2"]
    assert len(found["ratios"]) == 4 and all(min(result["ratios"]) > 0 for result in found["ratios"].values())
