#!/usr/bin/env python3
r"""Let models write the answers of a synthetic task: the same weights in SOFT and in STANDARD, beside a baseline.

example:
  python tools/task_accuracy.py --model runs/why_feedback/fbt/export --baseline runs/why_feedback/standard/export \
      --output runs/why_feedback

Answers are written greedily after a plain prompt, on rows that no run was trained on. The last line of the table has
the accuracy of 1, 2, 3, ... parallel passes that read the true answers. Writes task_accuracy.json and
task_accuracy.png.
Exit codes: 0 done, 2 options, 4 model folder, 5 logits or states that are not finite.
"""

import argparse
import sys


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder made by tools/convert_to_hf.py, trained with feedback")
    parser.add_argument("--baseline", help="folder of a model trained with one pass")
    parser.add_argument("--task", default="cot5", choices=["cot5"], help="a task whose answers are written")
    parser.add_argument("--rows", type=int, default=1000, help="answers to write (default: 1000)")
    parser.add_argument("--length", type=int, default=32, help="positions of a row (default: 32)")
    parser.add_argument("--seed", type=int, default=10_001, help="of the rows; not that of training (default: 10001)")
    parser.add_argument("--output", default=".", help="folder of the results (default: this one)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = vars(parse(argv))
    as_json = options.pop("json")
    from megatron_fbt.analysis.task_report import TaskReportOptions, describe, measure  # so that --help is instant
    from megatron_fbt.data.tool import run_report

    return run_report(lambda: measure(TaskReportOptions(**options)), describe, as_json)


if __name__ == "__main__":
    sys.exit(main())
