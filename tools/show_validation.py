#!/usr/bin/env python3
"""Table of a run's validation losses: a column for each pass and those under the recurrence that decoding follows.

example:
  python tools/show_validation.py --run runs/tiny_cpu --unigram_entropy 5.87 --margin 0.5

Exit codes: 0 done, 1 a pass of the last validation is not below entropy - margin, 2 options, 3 no validation found.
"""

import argparse
import json
import math
import sys

from megatron_fbt.analysis.validations import describe, read_validations
from megatron_fbt.data.tool import run_tool


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("--unigram_entropy", type=float, help="in nats per token, see tools/corpus_entropy.py")
    parser.add_argument("--margin", type=float, help="what the last losses must be below the entropy")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if args.margin is not None and args.unigram_entropy is None:
        parser.error("--margin needs --unigram_entropy")
    for option in ("margin", "unigram_entropy"):
        if not math.isfinite(getattr(args, option) or 0.0):
            parser.error(f"--{option} {getattr(args, option)}: not a finite number")
    return args


def main(argv=None) -> int:
    args, validations = parse(argv), []
    code = run_tool(lambda: validations.extend(read_validations(args.run)))
    if code:
        return code
    if args.json:
        print(json.dumps({"validations": validations, "unigram_entropy": args.unigram_entropy}))
    else:
        print(describe(validations, args.unigram_entropy))
    last = validations[-1]["losses"]
    if args.unigram_entropy is not None:
        limit = args.unigram_entropy - (args.margin or 0.0)
        if any(loss is None or loss > limit for loss in last):
            print(f"error: the last validation losses {last} are not all below {limit:.4f}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
