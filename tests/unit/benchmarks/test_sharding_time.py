"""The benchmark of optimizer sharding runs."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import sharding_time


def test_a_quick_run():
    command = [sys.executable, Path(sharding_time.__file__), "--quick", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout)
    assert [name.split()[0] for name in found] == [*sharding_time.SHARDINGS[1:], "none"]
    assert all(len(result["ratios"]) == 2 and min(result["ratios"]) > 0 for result in found.values())
