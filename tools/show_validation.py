#!/usr/bin/env python3
"""Table of a run's validation losses, one column for each pass, beside the unigram entropy of its corpus.

example:
  python tools/show_validation.py --run runs/tiny_cpu --unigram_entropy 5.87 --margin 0.5

Exit codes: 0 done, 1 a loss of the last validation is not below entropy - margin, 2 options, 3 no validation found.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from megatron_fbt.errors import DataError, FBTError
from megatron_fbt.training.console import VALIDATION_FIELD, pass_values
from megatron_fbt.training.metrics import read_metrics


def read_validations(run: str) -> list:
    """[(step, [loss of pass 1, ...]), ...] of a run folder.

    Raises:
        DataError: if there is none.
    """
    path = Path(run) / "metrics.jsonl"
    found = [(row["step"], pass_values(row, VALIDATION_FIELD)) for row in read_metrics(path)]
    found = [(step, losses) for step, losses in found if losses]
    if not found:
        raise DataError(f"{path}: no row has {VALIDATION_FIELD.format(1)}; has the run got as far as a validation?")
    return found


def text(value) -> str:
    return "non-finite" if value is None else f"{value:.4f}"


def table(validations: list, entropy) -> str:
    passes = max(len(losses) for _, losses in validations)
    lines = ["  ".join([f"{'step':>8}"] + [f"{f'pass {k}':>10}" for k in range(1, passes + 1)])]
    lines += ["  ".join([f"{step:>8}"] + [f"{text(loss):>10}" for loss in losses]) for step, losses in validations]
    if entropy is not None:
        lines.append(f"unigram entropy of the corpus: {entropy:.4f} nats per token")
    return "\n".join(lines)


def main(argv=None) -> int:
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
    try:
        validations = read_validations(args.run)
    except FBTError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        rows = [{"step": step, "losses": losses} for step, losses in validations]
        print(json.dumps({"validations": rows, "unigram_entropy": args.unigram_entropy}))
    else:
        print(table(validations, args.unigram_entropy))
    last = validations[-1][1]
    if args.unigram_entropy is not None:
        limit = args.unigram_entropy - (args.margin or 0.0)
        if any(loss is None or loss > limit for loss in last):
            print(f"error: the last validation losses {last} are not all below {limit:.4f}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
