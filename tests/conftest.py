"""Settings of every test: one thread for each process, so that two workers do not fight for two cores."""

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def hangups():
    """Tests and what they start get SIGHUP as from a terminal, also where nohup has started them all."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root folder of the repository."""
    return Path(__file__).resolve().parent.parent
