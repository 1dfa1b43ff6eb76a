#!/usr/bin/env python3
"""Put training runs side by side at equal tokens and at equal token-equivalents (tokens x passes: equal compute).

example:
  python tools/compare_runs.py runs/baseline runs/fbt --output runs/comparison
  python tools/compare_runs.py runs/a runs/b runs/c --baseline runs/b --json

Reads metrics.jsonl and config.yaml of the run folders; the first one is the baseline. Tells the losses where all are
measured, and how many tokens the baseline needs for the final loss of each other run. Runs may still be going on.
Exit codes: 0 done, 2 options, 3 no usable metrics.
"""

import argparse
import sys

from megatron_fbt.data.tool import run_report


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", help="run folders, at least two of them")
    parser.add_argument("--baseline", metavar="RUN", help="the run to compare with (default: the first one)")
    parser.add_argument("--output", metavar="DIR", help="write compare_runs.json and compare_runs.png there")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    args = parser.parse_args(argv)
    from megatron_fbt.analysis.compare import describe
    from megatron_fbt.analysis.run_comparison import compare

    return run_report(lambda: compare(args.run, args.baseline, args.output), describe, args.json)


if __name__ == "__main__":
    sys.exit(main())
