"""The cluster of the session, and tiny runs as its jobs."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_commands
from tests.slurm.jobs import Jobs


@pytest.fixture(scope="session")
def cluster():
    """Two nodes of a real SLURM; skipped where slurm-wlm and munge are not installed."""
    missing = missing_commands()
    if missing or os.geteuid() != 0:
        lacking = f"no {', '.join(missing)}; as root: apt-get install slurm-wlm munge" if missing else "not root"
        print(f"SLURM's tests are skipped: {lacking}")
        pytest.skip(f"a SLURM of our own cannot be started: {lacking}")
    folder = Path(tempfile.mkdtemp(prefix="fbt-slurm-", dir="/tmp"))
    cluster = Cluster(folder)
    # A time limit ends pytest by this signal, which would leave the daemons behind.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        cluster.start()
        yield cluster
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        cluster.stop()
        signal.signal(signal.SIGTERM, previous)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def jobs(cluster, tmp_path):
    """Makes jobs in a folder of the test's own."""
    return Jobs(cluster, tmp_path)
