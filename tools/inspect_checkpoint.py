#!/usr/bin/env python3
"""What a checkpoint is: step, time, parameters, layout, data, size; and that its files are there in their sizes.

example:
  python tools/inspect_checkpoint.py --checkpoint runs/tiny_cpu
  python tools/inspect_checkpoint.py --checkpoint runs/tiny_cpu/checkpoints/step_00000100 --config

Exit codes: 0 done, 2 options, 4 damaged or no checkpoint there. tools/verify_checkpoint.py reads all of its bytes.
"""

import argparse
import json
import signal
import sys

from megatron_fbt.ending import tell
from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.integrity import describe_checkpoint
from megatron_fbt.training.run_folder import CONFIG_FILE, find_step_folder


def text(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(text, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="a step_... folder, or a run folder for its newest one")
    parser.add_argument("--config", action="store_true", help="print the configuration that it was written with, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        folder = find_step_folder(args.checkpoint)
        facts = describe_checkpoint(folder)
    except CheckpointError as error:
        return tell(error)
    config = (folder / CONFIG_FILE).read_text(encoding="utf-8") if args.config else None
    if args.json:
        print(json.dumps({**facts, **({"config": config} if config else {})}))
        return 0
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):20}{text(value)}")
    if config:
        print(f"\n{config}", end="")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may leave first
    sys.exit(main())
