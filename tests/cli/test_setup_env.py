"""examples/setup_env.sh says what is wrong, and is quick when there is nothing to do."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path):
    """A folder with what the script reads."""
    root = tmp_path / "a clone"
    (root / "examples").mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "setup_env.sh", root / "examples")
    for name in ("constraints.txt", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    return root


@pytest.fixture
def environment(tmp_path):
    """A virtual environment without pip, as the environment variables of a shell in which it is active."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    return os.environ | {"VIRTUAL_ENV": str(folder)}


def run(clone, environment, *command):
    command = command or ("bash", "examples/setup_env.sh")
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=60)


def test_failing_pip_is_reported(clone, environment):
    result = run(clone, environment)
    assert result.returncode == 1
    assert "error: 'pip install torch==" in result.stderr
    assert not (Path(environment["VIRTUAL_ENV"]) / ".megatron_fbt_installed").exists()


def test_failure_reaches_the_script_that_sources_it(clone, environment):
    result = run(clone, environment, "bash", "-c", "set -u; source examples/setup_env.sh || exit 7; echo reached")
    assert (result.returncode, result.stdout) == (7, "")


def test_no_python(clone, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(shutil.which(name))
    result = run(clone, {"PATH": str(tools)})
    assert result.returncode == 1
    assert "Python 3.11 or 3.12" in result.stderr and "none is on PATH" in result.stderr


def test_second_call_installs_nothing_until_the_pins_change(clone, environment):
    record = clone / "calls"
    stand_in = (
        Path(environment["VIRTUAL_ENV"]) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "pip.py"
    )
    stand_in.write_text(f"import sys; print(sys.argv[1:], file=open({str(record)!r}, 'a'))")
    assert run(clone, environment).returncode == 0
    calls = record.read_text().splitlines()
    assert len(calls) == 2
    assert "'torch==" in calls[0] and "constraints" not in calls[0]
    assert "constraints.txt" in calls[1] and "[dev]" in calls[1]
    again = run(clone, environment)
    assert again.returncode == 0 and "already installed" in again.stderr
    assert record.read_text().splitlines() == calls
    with open(clone / "constraints.txt", "a") as file:
        file.write("# changed\n")
    assert run(clone, environment).returncode == 0
    assert len(record.read_text().splitlines()) == 4
