#!/usr/bin/env python3
r"""Write rows of a synthetic task, for a training run with data.format labelled.

example:
  python tools/task_rows.py --task cot5 --rows 96000 --output runs/why_feedback/rows.jsonl

Tasks: parity (every position is asked for the parity of the bits so far), fsm (for the state of a random automaton),
cot5 (digits, then one token for each that tells whether their sum so far, mod 5, is at least 3).
Exit codes: 0 done, 2 options.
"""

import argparse
import sys


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cot5", help="parity, fsm or cot5 (default)")
    parser.add_argument("--rows", type=int, required=True, help="how many")
    parser.add_argument("--length", type=int, default=32, help="data.sequence_length (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="other seeds give other rows (default: 0)")
    parser.add_argument("--output", required=True, help="file to write, .jsonl")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = parse(argv)
    from megatron_fbt.analysis.task_report import make_rows  # so that --help is instant
    from megatron_fbt.analysis.tasks import TASKS, write_rows
    from megatron_fbt.data.tool import run_report

    def work() -> dict:
        write_rows(make_rows(options.task, options.rows, options.length, options.seed), options.output)
        return {"output": options.output, "rows": options.rows, "vocab_size": TASKS[options.task].vocab_size}

    def describe(report: dict) -> str:
        return f"{report['rows']:,} rows -> {report['output']}; model.vocab_size {report['vocab_size']}"

    return run_report(work, describe, options.json)


if __name__ == "__main__":
    sys.exit(main())
