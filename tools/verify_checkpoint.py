#!/usr/bin/env python3
"""Reads every file of a checkpoint and compares it with the checkpoint's manifest.

example:
  python tools/verify_checkpoint.py --checkpoint runs/tiny_cpu
  python tools/verify_checkpoint.py --checkpoint runs/tiny_cpu --all --json

Exit codes: 0 intact, 2 options, 4 damaged or no checkpoint there.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from megatron_fbt.ending import tell
from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.integrity import find_damage
from megatron_fbt.training.run_folder import find_step_folder


def checkpoints(named: str, every: bool) -> list:
    """Folders to look at.

    Raises:
        CheckpointError: there is none.
    """
    if not every:
        return [find_step_folder(named)]
    folder = Path(named) / "checkpoints" if (Path(named) / "checkpoints").is_dir() else Path(named)
    found = sorted(folder.glob("step_*"))
    if not found:
        raise CheckpointError(f"{folder} holds no step_... folder; name the run's folder")
    return found


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="a step_... folder, or a run folder for its newest one")
    parser.add_argument("--all", action="store_true", help="all checkpoints of the run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        problems = {str(folder): find_damage(folder) for folder in checkpoints(args.checkpoint, args.all)}
    except CheckpointError as error:
        return tell(error)
    if args.json:
        print(json.dumps({"intact": not any(problems.values()), "checkpoints": problems}))
    else:
        for folder, found in problems.items():
            print(f"{folder}: {'damaged' if found else 'intact'}", *(f"  {problem}" for problem in found), sep="\n")
    return CheckpointError.exit_code if any(problems.values()) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may leave first
    sys.exit(main())
