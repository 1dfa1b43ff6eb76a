"""Whether a job goes back into the queue after its run has left. Needs no torch.

The job script calls `begin` before the run and `end` after it. `end` prints one word to standard output, `end` or the
seconds after which the job may start again, and says why on standard error. <run>/slurm/starts.jsonl keeps what was.
"""

import os
import re
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Optional, Sequence

from megatron_fbt.config.rules import raise_problems
from megatron_fbt.ending import tell
from megatron_fbt.errors import BadNumbersError, CheckpointError, ConfigError, DataError, FBTError, StoppedBySignal
from megatron_fbt.slurm.job import RequeueConfig
from megatron_fbt.slurm.starts import FOLDER, STARTS, Start, newest_checkpoint, read_starts, write_start

BAD_NODE = 69
"""Exit code of the preflight."""
LONGEST_BACKOFF_S = 3600
MEANINGS = {
    ConfigError.exit_code: "configuration or command line",
    DataError.exit_code: "data or tokenizer",
    CheckpointError.exit_code: "checkpoint or run folder",
    BadNumbersError.exit_code: "bad numbers: too many steps in a row were not finite",
    BAD_NODE: "the preflight found a bad node",
}
"""Codes of failures that a second try would not mend."""
RESUMABLE = StoppedBySignal.exit_code
STOPPED_EARLY = (128 + signal.SIGUSR1, 128 + signal.SIGTERM)
"""A run that does not watch its signals yet dies of them."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of the job."""

    word: str
    """`end`, seconds until the next start, or the state in which SLURM has taken the job away."""
    reason: str


def decide(code: int, warned: str, starts: Sequence[Start], budget: RequeueConfig, state: str = "RUNNING") -> Verdict:
    """Whether the job goes on.

    Args:
        code: exit code of the run.
        warned: name of the signal that the script received; "" = none.
        starts: of this job so far, the one that has just ended last.
        budget: how often it may.
        state: of the job in the queue; one that is no longer RUNNING is SLURM's to end or to start again.
    """
    if code == 0:
        return Verdict("end", "finished: exit code 0")
    if code in MEANINGS:
        return Verdict("end", f"failed: exit code {code}, {MEANINGS[code]}; starting again would not help")
    if code == RESUMABLE and not warned:
        return Verdict("end", f"stopped without a warning of SLURM's: exit code {code}; submit the job to go on")
    what = f"stopped by {warned} and saved" if code == RESUMABLE else f"failed: {describe_code(code)}"
    if warned and code in STOPPED_EARLY:
        what = f"ended by {warned} before it could save"
    if state != "RUNNING":
        return Verdict(state, f"{what}; not put back into the queue, it is {state}")
    last = starts[-1]
    if budget.max_restarts is not None and last.restart >= budget.max_restarts:
        return Verdict("end", f"{what}; restart budget exhausted: {last.restart} restarts (requeue.max_restarts)")
    if last.progressed:
        again = "with the checkpoint before" if code != RESUMABLE else "from its checkpoint"
        delay = 0 if code == RESUMABLE else min(budget.backoff_s, LONGEST_BACKOFF_S)
        return Verdict(str(delay), f"{what}; goes on {again} ({last.reached})")
    idle = idle_starts(starts)
    if idle >= budget.max_failures:
        return Verdict(
            "end",
            f"{what}; restart budget exhausted: {idle} starts in a row without a new checkpoint (requeue.max_failures)",
        )
    delay = min(budget.backoff_s * 2 ** (idle - 1), LONGEST_BACKOFF_S)
    return Verdict(str(delay), f"{what}, start {idle} of {budget.max_failures} without a new checkpoint; in {delay} s")


def idle_starts(starts: Sequence[Start]) -> int:
    """Latest starts in a row that wrote no checkpoint."""
    count = 0
    for start in reversed(starts):
        if start.progressed:
            break
        count += 1
    return count


def describe_code(code: int) -> str:
    """An exit code in words."""
    return f"exit code {code}" + (f", ended by signal {code - 128}" if 128 < code < 160 else "")


def last_error(log: Optional[Path], mark: str) -> Optional[str]:
    """The last line of a log that begins with `error:` or ends a traceback, after the last line that has the mark."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace") if log else ""
    except OSError:
        return None
    text = text.rpartition(mark)[2]
    found = re.findall(r"^(?:\[[^\]]*\]:\s*|\d+: )?(error: .*|[A-Za-z_.]+(?:Error|Exception): .*)$", text, re.MULTILINE)
    # The ranks of a node share a pipe: a line may stand behind half a line of another one.
    found = found or re.findall(r"(?<!: )error: .*", text)
    return found[-1] if found else None


def begin(options: Namespace, job: str, restart: int) -> str:
    """Note a start; a line for the log."""
    run_dir = Path(options.run_dir)
    write_start(run_dir, Start(job, restart, time.time(), newest_checkpoint(run_dir)))
    return mark_of(job, restart)


def mark_of(job: str, restart: int) -> str:
    """The line of the log with which a start begins."""
    return f"== job {job}, start {restart + 1}"


def end(options: Namespace, job: str, restart: int) -> Verdict:
    """Note how a start ended, and decide."""
    run_dir = Path(options.run_dir)
    starts = [start for start in read_starts(run_dir, job) if start.restart <= restart]
    if not starts or starts[-1].restart < restart:  # the line of its beginning was lost
        starts.append(Start(job, restart, time.time(), starts[-1].reached if starts else None))
    last = starts[-1]
    last.ended, last.exit_code, last.reached = time.time(), options.exit_code, newest_checkpoint(run_dir)
    verdict = decide(options.exit_code, options.warned, starts, budget_of(options), options.state)
    last.verdict = verdict.word
    write_start(run_dir, last)
    return verdict


def budget_of(options: Namespace) -> RequeueConfig:
    """How often the job may start again.

    Raises:
        ConfigError: naming each option that is out of range.
    """
    budget = RequeueConfig(
        max_failures=options.max_failures, max_restarts=options.max_restarts, backoff_s=options.backoff_s
    )
    raise_problems([problem.replace("requeue.", "--") for problem in budget.problems()])
    return budget


def restart_count(environment: Mapping[str, str]) -> int:
    """How often SLURM has put this job back.

    Raises:
        ConfigError: it is no number.
    """
    text = environment.get("SLURM_RESTART_COUNT") or "0"
    if not text.isdecimal():
        raise ConfigError(f"SLURM_RESTART_COUNT = {text!r}: not a whole number; unset it, SLURM sets it itself")
    return int(text)


def build_parser() -> ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="python -m megatron_fbt.slurm.requeue", description=__doc__.splitlines()[0])
    parser.add_argument("when", choices=("begin", "end"), help="before the run, or after it")
    parser.add_argument("--run_dir", required=True, help="the run folder")
    parser.add_argument("--exit_code", type=int, default=1, help="of the run")
    parser.add_argument("--warned", default="", help="signal that the script received")
    parser.add_argument("--state", default="RUNNING", help="of the job in the queue")
    parser.add_argument("--max_failures", type=int, default=RequeueConfig.max_failures)
    parser.add_argument("--max_restarts", type=int, default=None)
    parser.add_argument("--backoff_s", type=int, default=RequeueConfig.backoff_s)
    parser.add_argument("--log", type=Path, help="the job's log, in which the last error is looked for")
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Note a start or decide; the exit code."""
    options = build_parser().parse_args(argv)
    try:
        if not options.run_dir.strip():
            raise ConfigError(f"--run_dir {options.run_dir!r}: empty; name the run folder")
        budget_of(options)
        _note(options, os.environ.get("SLURM_JOB_ID", "none"), restart_count(os.environ))
    except FBTError as error:
        return tell(error)
    except OSError as error:
        path = f"{options.run_dir}/{FOLDER}/{STARTS}"
        return tell(ConfigError(f"{path}: cannot be written: {error.strerror}; mend the folder or free space"))
    return 0


def _note(options: Namespace, job: str, restart: int) -> None:
    if options.when == "begin":
        print(begin(options, job, restart), flush=True)
        return
    why = last_error(options.log, mark_of(job, restart)) if options.exit_code not in (0, RESUMABLE) else None
    verdict = end(options, job, restart)
    if why:
        print(f"last error: {why}", file=sys.stderr)
    print(f"job {job}: {verdict.reason}", file=sys.stderr, flush=True)
    print(verdict.word if verdict.word.isdecimal() else "end", flush=True)


if __name__ == "__main__":
    sys.exit(main())
