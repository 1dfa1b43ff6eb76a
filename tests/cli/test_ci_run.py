""".ci/run installs SLURM where it is missing, and runs the tests whatever comes of that."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("bash", "dirname", "mktemp", "tail", "rm", "sleep", "env")
DAEMONS = ("slurmctld", "slurmd", "munged")
STUBS = {
    "id": "echo 0",
    "apt-get": 'echo "$@ $DEBIAN_FRONTEND" >> "$CALLS"',
    # Three hundred seconds become one.
    "timeout": 'kill_after=$1; shift 2; exec {timeout} "$kill_after" 1 "$@"',
}
INSTALLED = "-q -o DPkg::Lock::Timeout=60 install -y --no-install-recommends slurm-wlm munge noninteractive"


@pytest.fixture
def ci_run(tmp_path):
    """Runs a copy of the script where only stand-ins are found; what it printed, and the calls of apt-get."""
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    for name in ("tools", "tests", ".ci"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "tests" / "run.sh").write_text('echo "tests $*"\nexit 7\n')
    for name in NEEDED:
        (tools / name).symlink_to(shutil.which(name))
    calls.touch()

    def call(**changed):
        for name, text in {**STUBS, **changed}.items():
            if text is not None:
                (tools / name).write_text(f"#!/bin/bash\n{text.replace('{timeout}', shutil.which('timeout'))}\n")
                (tools / name).chmod(0o755)
        environment = {"PATH": str(tools), "CALLS": str(calls), "TMPDIR": str(tmp_path)}
        command = [shutil.which("bash"), str(tmp_path / ".ci" / "run")]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert (result.returncode, result.stdout) == (7, "tests --slow\n"), result.stderr
        assert not list(tmp_path.glob("tmp.*"))
        return result.stderr.splitlines(), calls.read_text().splitlines()

    return call


def test_where_the_daemons_are_nothing_is_installed(ci_run):
    assert ci_run(**{name: "exit 1" for name in DAEMONS}) == ([], [])


@pytest.mark.parametrize("lacking", DAEMONS)
def test_a_daemon_that_is_missing_is_installed(ci_run, lacking):
    there = {name: "exit 1" for name in DAEMONS if name != lacking}
    assert ci_run(**there) == ([], ["-q update noninteractive", INSTALLED])


def test_what_apt_get_fails_with_is_one_line(ci_run):
    said, calls = ci_run(**{"apt-get": 'echo "$@" >> "$CALLS"; echo Hit; echo "E: no network" >&2; exit 100'})
    assert calls == ["-q update"]
    reason = "'300 apt-get -q update' failed (100): E: no network".replace("300 ", "")
    assert said == [f"[ci] no SLURM, the tests of tests/slurm are skipped: {reason}"]
    said, calls = ci_run(**{"apt-get": 'echo "$@" >> "$CALLS"; [ "$2" = update ] || exit 100'})
    assert len(calls) == 3 and len(said) == 1 and "slurm-wlm munge' failed (100)" in said[0]


def test_an_apt_get_that_hangs_is_cut_short(ci_run):
    said, _ = ci_run(**{"apt-get": "sleep 60"})
    assert len(said) == 1 and "failed (124)" in said[0]


@pytest.mark.parametrize("changed", [{"id": "echo 1000"}, {"apt-get": None}])
def test_who_cannot_install_is_told_what_is_missing(ci_run, changed):
    said, calls = ci_run(**changed)
    assert calls == [] and len(said) == 1 and "as root, apt-get install slurm-wlm munge" in said[0]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
