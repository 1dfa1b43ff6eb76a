"""What the commands in tools/ share: exit codes, reports, an orderly end on a signal."""

import json
import signal
import sys
from typing import Any, Callable, Dict

from megatron_fbt.ending import tell
from megatron_fbt.errors import FBTError
from megatron_fbt.training.metrics import json_ready


def run_tool(work: Callable[[], None]) -> int:
    """Run a command and give its exit code: 0, the error's own, or 128 + the signal that stopped it.

    Errors that a user can cause are printed to standard error without a traceback. SIGTERM ends the work like Ctrl-C,
    so that temporary files are removed.
    """

    def stop(number, frame):
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        work()
    except FBTError as error:
        return tell(error)
    except KeyboardInterrupt:
        print("stopped: no output is incomplete", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)
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
    print(json.dumps(json_ready(report)) if as_json else _encodable(describe(report)))
    if report.get("alarm"):
        print(f"alarm: {report['alarm']}", file=sys.stderr)
        return 1
    return 0


def _encodable(text: str) -> str:
    """A text in which characters that the terminal's encoding lacks are spelled out."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_report(report: dict, as_json: bool) -> None:
    """Print a report to standard output: one JSON object, or a line for each entry."""
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        if isinstance(value, list):
            for entry in value:
                print(f"{name[:-1]}: " + ", ".join(f"{key} {content}" for key, content in entry.items()))
        elif isinstance(value, dict):
            print(f"{name}: " + (", ".join(f"{key} {content}" for key, content in value.items()) or "none"))
        else:
            print(f"{name}: {value:,}" if isinstance(value, (int, float)) else f"{name}: {value}")
