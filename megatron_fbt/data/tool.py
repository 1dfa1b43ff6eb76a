"""What the commands in tools/ share: exit codes, reports, an orderly end on a signal."""

import json
import os
import signal
import sys
from typing import Any, Callable, Dict

from megatron_fbt.ending import tell
from megatron_fbt.errors import FBTError
from megatron_fbt.training.metrics import json_ready


def run_tool(work: Callable[[], None]) -> int:
    """Run a command and give its exit code: 0, the error's own, or 128 + the signal that stopped it.

    Errors that a user can cause are printed to standard error without a traceback. SIGTERM and SIGHUP end the work
    like Ctrl-C, so that temporary files are removed.
    """

    def stop(number, frame):
        raise SystemExit(128 + number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    try:
        work()
    except FBTError as error:
        return tell(error)
    except KeyboardInterrupt:
        print("stopped: no output is incomplete", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
    return 0


def run_report(work: Callable[[], Dict[str, Any]], describe: Callable[[Dict[str, Any]], str], as_json: bool) -> int:
    """Run a command that finds something out, print its report to standard output, and give the exit code.

    An `alarm` in the report goes to standard error as well, and makes the exit code 1.

    Args:
        work: Gives the report.
        describe: The report for a person.
        as_json: Print one JSON object instead.
    """
    report: Dict[str, Any] = {}
    code = run_tool(lambda: report.update(work()))
    if code:
        return code
    _print(json.dumps(json_ready(report)) if as_json else describe(report))
    if report.get("alarm"):
        print(f"alarm: {report['alarm']}", file=sys.stderr)
        return 1
    return 0


def _print(text: str) -> None:
    """Print to standard output; characters that its encoding lacks are spelled out, and its reader may have left."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails at its end


def print_report(report: dict, as_json: bool) -> None:
    """Print a report to standard output: one JSON object, or a line for each entry."""
    if as_json:
        _print(json.dumps(report))
        return
    lines = []
    for name, value in report.items():
        if isinstance(value, list):
            for entry in value:
                lines.append(f"{name[:-1]}: " + ", ".join(f"{key} {content}" for key, content in entry.items()))
        elif isinstance(value, dict):
            lines.append(f"{name}: " + (", ".join(f"{key} {content}" for key, content in value.items()) or "none"))
        else:
            lines.append(f"{name}: {value:,}" if isinstance(value, (int, float)) else f"{name}: {value}")
    _print("\n".join(lines))
