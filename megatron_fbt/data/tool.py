"""What the data commands in tools/ share: exit codes, reports, an orderly end on a signal."""

import json
import signal
import sys
from typing import Callable

from megatron_fbt.errors import FBTError


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
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped: nothing was written", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


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
