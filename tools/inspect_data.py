#!/usr/bin/env python3
"""Show documents and packed rows as text with boundaries, loss mask and feedback region; count what a corpus holds.

example:
  python tools/inspect_data.py --config run.yaml --step 100
  python tools/inspect_data.py --config run.yaml --row 0 17 --random_rows 2 --pass_number 3
  python tools/inspect_data.py --data data/corpus --tokenizer_path data/tokenizer.model --document 5 --stats

Rows are those of the run, from its own cache, which is filled if it is empty: what training reads for that sample
number, and what it fuses in that pass. Fields of the configuration may follow, as for the run.
Exit codes: 0 done, 2 options or configuration, 3 data, 4 checkpoint.
"""

import argparse
import signal
import sys


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--config", help="YAML file of a run; [--section.field VALUE ...] may follow")
    place.add_argument("--data", nargs="+", metavar="PATH", help="prefixes or manifests, without a run")
    parser.add_argument("--tokenizer_path", help="with --data; without it, ids are shown")
    types = ("sentencepiece", "huggingface", "tiktoken")
    parser.add_argument("--tokenizer_type", choices=types, default="sentencepiece", help="(default: sentencepiece)")
    parser.add_argument("--document", type=int, nargs="+", default=[], metavar="N", help="documents, from 0")
    parser.add_argument("--random_documents", type=int, default=0, metavar="N", help="so many more")
    parser.add_argument("--row", type=int, nargs="+", default=[], metavar="N", help="rows by sample number, from 0")
    parser.add_argument("--step", type=int, nargs="+", default=[], metavar="N", help="all rows of steps, from 1")
    parser.add_argument("--random_rows", type=int, default=0, metavar="N", help="so many more")
    parser.add_argument("--validation", action="store_true", help="rows of validation instead of training")
    parser.add_argument("--pass_number", type=int, default=2, help="whose feedback region is marked (default: 2)")
    parser.add_argument("--stats", action="store_true", help="lengths, copies, tokens per byte, end tokens")
    parser.add_argument("--sample", type=int, help="for --stats, look into so many documents only")
    parser.add_argument("--max_tokens", type=int, default=1000, help="of a document that are shown (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args, overrides = parser.parse_known_args(argv)
    if overrides and not args.config:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    for name in ("random_documents", "random_rows", "sample", "max_tokens", "seed"):
        if (getattr(args, name) or 0) < 0:
            parser.error(f"--{name}: {getattr(args, name)} is negative")
    if args.pass_number < 2:
        parser.error(f"--pass_number: {args.pass_number}; feedback begins in pass 2")
    rows, documents = args.row or args.step or args.random_rows, args.document or args.random_documents
    if not (rows or documents or args.stats):
        parser.error("nothing to show: give --document, --random_documents, --row, --step, --random_rows or --stats")
    return args, overrides


def main(argv=None) -> int:
    args, overrides = parse(argv)
    from megatron_fbt.data.tool import run_report  # so that --help is instant

    def work() -> dict:
        from megatron_fbt.data.inspection import inspect_from_options

        return inspect_from_options(vars(args), overrides)

    def describe(report: dict) -> str:
        from megatron_fbt.data.inspection import describe

        return describe(report)

    return run_report(work, describe, args.json)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may leave first
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that does not have the character
    sys.exit(main())
