#!/usr/bin/env python3
"""Show where a run stands: step, loss, time left, last checkpoint, its job in SLURM's queue, how its starts ended.

example:
  python tools/run_status.py runs/quickstart/run
  python tools/run_status.py runs/quickstart/run --json

Reads status.json, lease.json and slurm/starts.jsonl of the run folder, and asks squeue where there is one.
Exit codes: 0 done, 1 the run has failed or has been silent for ten minutes, 2 no run folder.
"""

import argparse
import signal
import sys

from megatron_fbt.data.tool import run_report


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    args = parser.parse_args(argv)
    from megatron_fbt.slurm.run_status import collect, describe

    return run_report(lambda: collect(args.run), describe, args.json)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may leave first
    sys.exit(main())
