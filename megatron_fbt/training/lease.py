"""<run.dir>/lease.json: one run, one owner. Needs no torch.

A lease is renewed while its owner lives and lapses when that stops, however it ended. A lock file would stay behind
after a kill.
"""

import json
import math
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.metrics import replace_file

LEASE = "lease.json"
RENEWALS = 6
"""Renewals within the time after which a lease lapses."""


CLOCK_S = 5
"""Seconds by which another machine's clock may be ahead without a word."""


@dataclass
class Holder:
    """Who holds a run folder."""

    token: str
    """Of this one start of a run."""
    job: Optional[str]
    """SLURM job id."""
    host: str
    pid: int
    process: str
    """Names the process among all of all machines: boot, name space, number, time of its start."""
    time: float
    """Of the last renewal, in seconds since 1970."""
    seconds: float
    """After which the lease lapses."""

    def describe(self) -> str:
        """The holder, for a person."""
        job = f"job {self.job}, " if self.job else ""
        age = round(time.time() - self.time)
        when = f"{max(0, age)} s ago" if age > -CLOCK_S else f"{-age} s from now (clock?)"
        return f"{job}pid {self.pid} on {self.host}, renewed {when}"


class Lease:
    """Takes the lease of a run folder, renews it in a thread, gives it back.

    Args:
        run_dir: exists.
        seconds: after which it lapses without renewal (checkpoint.lease_seconds).
    """

    def __init__(self, run_dir: Path, seconds: float):
        self.path, self.seconds = Path(run_dir) / LEASE, seconds
        process = process_name(os.getpid())
        job = os.environ.get("SLURM_JOB_ID") or None
        self._me = Holder(secrets.token_hex(8), job, socket.gethostname(), os.getpid(), process, 0.0, seconds)
        self._watched: Optional[Holder] = None
        self._watched_since = 0.0
        self._ended = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._lost: Optional[str] = None

    def try_to_take(self) -> Optional[str]:
        """One attempt.

        Returns:
            None: the lease is taken and is renewed from now on. Else for whose lapse to wait; try again soon.

        Raises:
            CheckpointError: somebody else holds it and renews it; or it cannot be read.
        """
        holder = self._found()
        if holder is None:
            if not self._create():
                return f"{self.path} is just being made by another process"
        elif self._is_over(holder):
            if not self._displace(holder):
                return f"{self.path} is just being taken over by another process"
        else:
            return self._wait_for(holder)
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()
        return None

    def _wait_for(self, holder: Holder) -> str:
        if self._watched is not None and (self._watched.token, self._watched.time) != (holder.token, holder.time):
            raise CheckpointError(
                f"run.dir = {str(self.path.parent)!r} is in use by another run ({holder.describe()}; {self.path}); "
                "wait for its end, or name another folder"
            )
        if self._watched is None:
            self._watched, self._watched_since = holder, time.monotonic()
        return f"{self.path.parent} is held by {holder.describe()}; it lapses {holder.seconds:g} s after its renewal"

    def _is_over(self, holder: Holder) -> bool:
        """Lapsed by the clock or since it is watched, of the same job, or of a process of this machine that is gone."""
        unchanged = self._watched is not None and self._watched.time == holder.time
        return (
            (holder.job is not None and holder.job == self._me.job)
            or time.time() - holder.time > holder.seconds
            or (unchanged and time.monotonic() - self._watched_since > holder.seconds)
            or is_gone(holder.process)
        )

    @property
    def held(self) -> bool:
        """Whether this process has the folder, as far as it knows."""
        return self._thread is not None and self._lost is None

    def check_noticed(self) -> None:
        """As check, but without a look at the file: what the thread has noticed.

        Raises:
            CheckpointError: see check.
        """
        if self._lost is not None:
            self.check()

    def check(self) -> None:
        """See that the lease is still held.

        Raises:
            CheckpointError: another run has taken it, after this process stood still for too long.
        """
        if self._thread is None:
            return
        holder = self._read()
        if self._lost is None and holder is not None and holder.token != self._me.token:
            self._lost = holder.describe()
        if self._lost is not None:
            raise CheckpointError(
                f"run.dir = {str(self.path.parent)!r} was taken over by another run ({self._lost}) after this one "
                f"stood still for more than {self.seconds:g} s (checkpoint.lease_seconds); nothing more is written"
            )

    def release(self) -> None:
        """Give it back, so that a successor need not wait."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        holder = self._read()
        if holder is not None and holder.token == self._me.token:
            self.path.unlink(missing_ok=True)

    def _keep(self) -> None:
        while not self._ended.wait(self.seconds / RENEWALS):
            holder = self._read()
            if holder is not None and holder.token != self._me.token:
                self._lost = holder.describe()
                return
            try:
                replace_file(self.path, self._content())
            except OSError:  # a full disk ends the run elsewhere, with a message
                continue

    def _content(self) -> str:
        self._me.time = time.time()
        return json.dumps(asdict(self._me), indent=1) + "\n"

    def _read(self) -> Optional[Holder]:
        """The holder as the owner sees it; None if there is none or it cannot be told: then this run goes on."""
        try:
            return read_holder(self.path)
        except (OSError, ValueError):
            return None

    def _found(self) -> Optional[Holder]:
        """The holder as a newcomer sees it; None if there is no lease. What was not written as one goes.

        Raises:
            CheckpointError: it cannot be read, so that somebody may hold the folder.
        """
        try:
            return read_holder(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {error}; another run may hold run.dir = {str(self.path.parent)!r}: mend "
                "the file's permissions, remove it if no run is at work there, or name another folder"
            ) from error
        except ValueError:
            self.path.unlink(missing_ok=True)
            return None

    def _create(self) -> bool:
        """Make the file unless somebody else just did."""
        draft = self.path.with_name(f".{LEASE}.{self._me.token}")
        try:
            draft.write_text(self._content(), encoding="utf-8")
            os.link(draft, self.path)
        except FileExistsError:
            if self.path.is_symlink() and not self.path.exists():
                raise CheckpointError(f"{self.path} is a symbolic link to nothing; remove it") from None
            return False
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error}; free space, or mend the folder") from error
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _displace(self, holder: Holder) -> bool:
        """Take the place of a lease that is over; of several successors one gets it."""
        aside = self.path.with_name(f".{LEASE}.{self._me.token}.old")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return False
        try:
            if json.loads(aside.read_text(encoding="utf-8")).get("token") != holder.token:
                os.rename(aside, self.path)  # a faster successor's
                return False
        finally:
            aside.unlink(missing_ok=True)
        return self._create()


def read_holder(path: Path) -> Holder:
    """What a lease file says.

    Raises:
        OSError: it cannot be read.
        ValueError: it was not written as a lease.
    """
    try:
        holder = Holder(**json.loads(path.read_text(encoding="utf-8")))
        named = (holder.token, holder.host, holder.process, holder.job or "")
        if not all(isinstance(text, str) for text in named) or not math.isfinite(holder.time + holder.seconds):
            raise ValueError("no holder")
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return holder


def process_name(pid: int) -> str:
    """A process's name for all times and machines; "" where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{boot}/{space}/{pid}/{started}"


def is_gone(process: str) -> bool:
    """Whether a process of this machine and name space has ended; False where that cannot be told."""
    own = process_name(os.getpid())
    if not process or not own or own.split("/")[:2] != process.split("/")[:2]:
        return False
    pid = int(process.split("/")[2])
    if process_name(pid) != process:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (OSError, IndexError):
        return True
