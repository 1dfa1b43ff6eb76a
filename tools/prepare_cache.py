#!/usr/bin/env python3
"""Fills the data cache of a run ahead of it: the order of its rows, or tokens of its JSON Lines; on one CPU, no GPU.

The run, started with the same configuration, then builds nothing. A cache that is complete may be read-only. The table
says what training reads of each source.

example:
  python tools/prepare_cache.py --config run.yaml
  python tools/prepare_cache.py --config run.yaml --data.cache_dir /shared/cache --training.train_tokens 1000000 --json

Exit codes: 0 done, 2 configuration, 3 data, 4 checkpoint.
"""

import argparse
import sys

from megatron_fbt.data.tool import run_report


def work(config: str, overrides) -> dict:
    from megatron_fbt.data.prepare import prepare_from_command_line

    return prepare_from_command_line(config, overrides)


def describe(report: dict) -> str:
    from megatron_fbt.data.prepare import describe

    return describe(report)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --config FILE [--section.field VALUE ...] [--json]",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML file of the run; fields of it may follow, as for the run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args, overrides = parser.parse_known_args(argv)
    return run_report(lambda: work(args.config, overrides), describe, args.json)


if __name__ == "__main__":
    sys.exit(main())
