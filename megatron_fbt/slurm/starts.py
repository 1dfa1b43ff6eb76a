"""What is kept beside a run of its jobs: the one that was submitted, and how each start ended. Needs no torch."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import List, Optional

from megatron_fbt.training.metrics import number, replace_file

FOLDER = "slurm"
STARTS = "starts.jsonl"
SUBMITTED = "submitted"


@dataclass
class Start:
    """One start of a job and how it ended."""

    job: str
    restart: int
    """SLURM_RESTART_COUNT."""
    began: float
    """Seconds since 1970."""
    checkpoint: Optional[str]
    """The run's newest checkpoint at the beginning."""
    ended: Optional[float] = None
    exit_code: Optional[int] = None
    reached: Optional[str] = None
    """The newest checkpoint at the end."""
    verdict: Optional[str] = None
    """`end`, seconds until the next start, or the state in which SLURM had taken the job away."""

    @property
    def is_whole(self) -> bool:
        """Whether every field is of its type; the file may have been written by anything."""
        texts = (self.checkpoint, self.reached, self.verdict)
        return (
            isinstance(self.job, str)
            and isinstance(self.restart, int)
            and number(self.began) is not None
            and (self.ended is None or number(self.ended) is not None)
            and (self.exit_code is None or isinstance(self.exit_code, int))
            and all(text is None or isinstance(text, str) for text in texts)
        )

    @property
    def progressed(self) -> bool:
        """Whether this start has written a checkpoint."""
        return self.reached is not None and self.reached != self.checkpoint


def newest_checkpoint(run_dir: Path) -> Optional[str]:
    """Name of the newest complete checkpoint; None if there is none."""
    try:
        return (run_dir / "checkpoints" / "latest").read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def read_starts(run_dir: Path, job: Optional[str] = None) -> List[Start]:
    """Starts of one job in their order; a line that a kill has cut short is left out.

    Args:
        run_dir: the run folder.
        job: its id; None = the job that started last.
    """
    try:
        lines = (run_dir / FOLDER / STARTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    starts = {}
    for line in lines:
        try:
            start = Start(**json.loads(line))
        except (ValueError, TypeError, RecursionError):
            continue
        if not start.is_whole:
            continue
        starts[start.job, start.restart] = start  # the line of the end follows that of the beginning
    if job is None and starts:
        job = max(starts.values(), key=lambda start: start.began).job
    return sorted((start for start in starts.values() if start.job == job), key=lambda start: start.restart)


def write_start(run_dir: Path, start: Start) -> None:
    """Add a line to the file of starts, also behind one that a kill has cut short."""
    path = run_dir / FOLDER / STARTS
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(asdict(start)).encode() + b"\n")


def note_submission(run_dir: Path, job: str) -> None:
    """Keep the id of the job that was submitted last, which has no start yet."""
    path = run_dir / FOLDER / SUBMITTED
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, job + "\n")


def submitted_job(run_dir: Path) -> Optional[str]:
    """Id of the job that was submitted last by tools/launch_slurm.py; None if there is none."""
    try:
        text = (run_dir / FOLDER / SUBMITTED).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"[0-9]{1,18}", text) else None
