"""One screen about a run: where it stands, what its job is doing, how earlier starts ended. Needs no torch."""

import shutil
import subprocess
import time
from calendar import timegm
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from megatron_fbt.errors import ConfigError
from megatron_fbt.slurm.requeue import RESUMABLE, describe_code
from megatron_fbt.slurm.starts import FOLDER, STARTS, newest_checkpoint, read_starts, submitted_job
from megatron_fbt.training.console import format_duration
from megatron_fbt.training.lease import CLOCK_S, LEASE, read_holder
from megatron_fbt.training.metrics import number
from megatron_fbt.training.status import read_status

SILENT_S = 600
"""A run that says it is running and has not written for so long is called silent."""
OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
"""States of a job that neither waits nor runs."""
QUEUE_FORMAT = "%i|%T|%M|%l|%R"


def collect(run: str) -> Dict[str, Any]:
    """What is known of a run.

    Returns:
        The fields of status.json, with `age_s` since it was written (negative by a wrong clock, None where no time is
        given), `silent`, `lost` (a job that is over and never said how it ended), `last_checkpoint`,
        `holder` (who has the folder, or None), `queue` (rows of squeue; None where there is no SLURM) and `starts`
        (of the last job).

    Raises:
        ConfigError: it is no run folder.
    """
    folder = Path(run)
    if not _is_folder(folder):
        raise ConfigError(f"run {run[:300]!r}: no such folder; name the folder of a run (run.dir)")
    status = read_status(folder / "status.json")
    starts = [asdict(start) for start in read_starts(folder)]
    begun, submitted = isinstance(status.get("state"), str), submitted_job(folder)
    if not begun and not starts and submitted is None:
        raise ConfigError(
            f"run {run!r}: no status.json that can be read, nor {FOLDER}/{STARTS} in it; name the folder of a run"
        )
    report: Dict[str, Any] = {"run": run, **(_usable(status) if begun else {"state": "waiting"})}
    if _gave_up(starts) and not (begun and report["state"] == "finished"):
        report["state"] = "failed"
    report["age_s"] = _age(report.get("time"))
    report["last_checkpoint"] = newest_checkpoint(folder) or report.get("last_checkpoint")
    report["holder"] = _holder(folder)
    report["starts"] = starts
    job = starts[-1]["job"] if starts else (report["holder"] or {}).get("job")
    report["queue"] = _queue([known for known in dict.fromkeys((job, submitted)) if known])
    report["lost"] = _lost(report, submitted)
    if not begun and report["state"] == "waiting":
        report["state"] = _state_before_the_run(report)
    if report["lost"] and (not begun or report["state"] == "running"):
        report["state"] = "failed"
    report["silent"] = report["state"] == "running" and (report["age_s"] or 0) > SILENT_S
    report["alarm"] = alarm(report)
    return report


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # no name that a folder may have
        return False


def _over(report: Dict[str, Any]) -> bool:
    """Whether SLURM has answered, and no job of the run is waiting or running."""
    return report["queue"] is not None and all(row.get("state") in OVER for row in report["queue"])


def _lost(report: Dict[str, Any], submitted: Optional[str]) -> Optional[str]:
    """What became of a job that is over and never said how it ended; None where all is in order."""
    holder, last = report["holder"], report["starts"][-1] if report["starts"] else None
    if not _over(report) or (holder and not holder["lapsed"]):
        return None
    if submitted and (last is None or (last["job"].isdecimal() and int(submitted) > int(last["job"]))):
        return f"job {submitted} is over and has not started: see its log"
    if last and last["ended"] is None:
        return f"job {last['job']} is over and its start {last['restart'] + 1} has no end: see its log"
    return None


def _state_before_the_run(report: Dict[str, Any]) -> str:
    """What a run is doing that has not written its status yet, and has not failed."""
    last = report["starts"][-1] if report["starts"] else {}
    if any(row.get("state") == "RUNNING" for row in report["queue"] or []):
        return "starting"
    if last.get("verdict") == "end":
        return "finished" if last["exit_code"] == 0 else "stopped"
    return "stopped" if _over(report) else "waiting"


NUMBERS = ("step", "train_steps", "tokens", "loss", "eta_s")


def _usable(status: Dict[str, Any]) -> Dict[str, Any]:
    """Its fields; what should be a number and is none becomes None."""
    return {name: number(value) if name in NUMBERS else value for name, value in status.items()}


def _gave_up(starts: List[Dict[str, Any]]) -> bool:
    """Whether the last start ended the job otherwise than finished or stopped."""
    last = starts[-1] if starts else {}
    return last.get("verdict") == "end" and last.get("exit_code") not in (None, 0, RESUMABLE)


def _queue(jobs: Sequence[str]) -> Optional[List[Dict[str, str]]]:
    """Rows of the queue of all jobs; None where none is known, or SLURM does not answer."""
    answers = [queue_of(job) for job in jobs]
    known = [rows for rows in answers if rows is not None]
    return [row for rows in known for row in rows] if known else None


def _age(written: Any) -> Optional[float]:
    """Seconds since a time of status.json, negative if it is still to come; None if it is no time."""
    try:
        return time.time() - timegm(time.strptime(str(written), "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return None


def _holder(folder: Path) -> Optional[Dict[str, Any]]:
    try:
        holder = read_holder(folder / LEASE)
    except (OSError, ValueError):
        return None
    lapsed = time.time() - holder.time > holder.seconds
    return {"job": holder.job, "host": holder.host, "pid": holder.pid, "lapsed": lapsed, "text": holder.describe()}


def queue_of(job: str) -> Optional[List[Dict[str, str]]]:
    """Rows of the queue of one job; None where SLURM does not answer."""
    if shutil.which("squeue") is None:
        return None
    command = ["squeue", "--noheader", f"--jobs={job}", f"--format={QUEUE_FORMAT}"]
    try:
        result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=30)
    except subprocess.TimeoutExpired:
        return None
    if result.returncode:
        return [] if "Invalid job id" in result.stderr else None  # an old job is forgotten
    names = ("job", "state", "time", "limit", "where")
    return [dict(zip(names, line.split("|"))) for line in result.stdout.splitlines() if line]


def describe(report: Dict[str, Any]) -> str:
    """The screen."""
    lines = [f"{report['run']}: {report['state']}" + (" (silent)" if report["silent"] else "")]
    if report.get("step") is not None:
        total, loss = report.get("train_steps"), report.get("loss")
        steps = f"{report['step']:,} of {'?' if total is None else f'{total:,}'}"
        lines.append(f"step             {steps}" + ("" if loss is None else f", loss {loss:.4f}"))
        lines.append(f"tokens           {report.get('tokens') or 0:,}")
    if report["state"] == "running":
        lines.append(f"left             {format_duration(report.get('eta_s'))}")
    lines.append(f"last checkpoint  {report['last_checkpoint'] or 'none'}")
    if "time" in report:
        lines.append(f"written          {_when(report)}")
    holder = report["holder"]
    if holder:
        lines.append(f"held by          {holder['text']}" + " (lapsed)" * holder["lapsed"])
    if report["queue"] is None:
        lines.append("queue            not asked: no job is known, or SLURM does not answer")
    elif not report["queue"]:
        lines.append("queue            the job is not in it")
    for row in report["queue"] or []:
        lines.append(
            f"queue            job {row['job']} {row['state']}, {row['time']} of {row['limit']}, {row['where']}"
        )
    lines += [_start_line(start) for start in report["starts"][-5:]]
    return "\n".join(map(_plain, lines))


def _plain(line: str) -> str:
    """A line in which control characters, of files that anything may have written, are spelled out."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def _when(report: Dict[str, Any]) -> str:
    age = report["age_s"]
    if report.get("time") is None:
        return "at an unknown time"
    if age is None:
        return f"at {report.get('time')!r} (clock?)"
    return f"{format_duration(age)} ago" if age > -CLOCK_S else f"{format_duration(-age)} from now (clock?)"


def _start_line(start: Dict[str, Any]) -> str:
    name = f"start {start['restart'] + 1}"
    if start.get("ended") is None:
        return f"{name:<16} of job {start['job']}, from {start.get('checkpoint') or 'the beginning'}: has not ended"
    seconds = start["ended"] - start["began"]
    took = format_duration(seconds) if seconds > -CLOCK_S else "clock?"
    code = "exit code unknown" if start["exit_code"] is None else describe_code(start["exit_code"])
    after = f"not put back into the queue, it was {start['verdict']}"
    if start["verdict"] == "end":
        after = "the end"
    elif str(start["verdict"]).isdecimal():
        after = f"back into the queue, {start['verdict']} s"
    reached = start["reached"] or "no checkpoint"
    return f"{name:<16} of job {start['job']}, {took}: {code}, {reached}; {after}"


def alarm(report: Dict[str, Any]) -> Optional[str]:
    """What a person should look at."""
    if report["lost"]:
        return report["lost"]
    if report["state"] == "failed":
        ended = f": {describe_code(report['starts'][-1]['exit_code'])}" if _gave_up(report["starts"]) else ""
        return f"the run has failed{ended}"
    if report["silent"]:
        return f"the run has not written for {format_duration(report['age_s'])}"
    return None
