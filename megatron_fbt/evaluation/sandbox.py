"""Generated programs, run where they can do little harm: a process of its own with limits.

This keeps accidents in (endless loops, memory, output, forks, stray files and connections), not an attacker: who
evaluates a model that may be hostile does so in a container or on a machine without anything of value.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import List, Sequence

from megatron_fbt.analysis.progress import PieceProgress


@dataclass
class Limits:
    """What one program may use."""

    seconds: float = 10.0
    """Wall-clock time; also of computing."""
    memory_mib: int = 1024
    """Address space."""
    file_mib: int = 16
    """Largest file, output included."""


@dataclass
class Outcome:
    """How a program ended: it passed if it ran to its end; `reason` tells why not."""

    passed: bool
    reason: str = ""


def run_programs(programs: Sequence[str], limits: Limits = Limits()) -> List[Outcome]:  # noqa: B008
    """Run programs, some at a time; in the order given."""
    with (
        ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1)))) as pool,
        PieceProgress(len(programs), "programs") as progress,
    ):

        def one(program: str) -> Outcome:
            outcome = run_program(program, limits)
            progress.advance()
            return outcome

        return list(pool.map(one, programs))


def run_program(program: str, limits: Limits = Limits()) -> Outcome:  # noqa: B008
    """Run a Python program in an empty folder that is removed afterwards.

    It passes if all of it was executed: leaving early, with whatever exit code, is a failure. A secret word that goes
    to the guard and comes back at the end says so.
    """
    word = secrets.token_hex(16)
    receive, send = os.pipe()
    with tempfile.TemporaryDirectory(prefix="fbt-program-", ignore_cleanup_errors=True) as folder:
        path, errors = Path(folder) / "program.py", Path(folder) / "stderr"
        path.write_text(program, encoding="utf-8", errors="surrogatepass")
        guard = str(Path(__file__).with_name("sandbox_guard.py"))
        numbers = [str(send), str(limits.seconds), str(limits.memory_mib), str(limits.file_mib)]
        with open(errors, "wb") as error_file:
            process = subprocess.Popen(
                [sys.executable, "-I", guard, str(path), *numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=error_file,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[send],
                start_new_session=True,
            )
        os.close(send)
        try:
            process.communicate(word.encode(), timeout=limits.seconds)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        with open(receive, "rb") as pipe:
            back = _whatever_is_there(pipe)
        if late:
            return Outcome(False, f"did not end within {limits.seconds:g} s")
        if back == word.encode():
            return Outcome(True)
        return Outcome(False, _last_line(errors) or f"left early with exit code {process.returncode}")


def _end(process: subprocess.Popen) -> None:
    """Kill a program and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


def _whatever_is_there(pipe) -> bytes:
    """Bytes in a pipe, without waiting for more from a process that may still hold it."""
    os.set_blocking(pipe.fileno(), False)
    return pipe.read(1024) or b""


def _last_line(path: Path) -> str:
    lines = path.read_bytes()[-2000:].decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:200] if lines else ""
