"""Export a training checkpoint as a folder that Hugging Face transformers loads by itself."""

import argparse
import json
import sys
from typing import List, Optional

from megatron_fbt.errors import FBTError

EXAMPLE = """example:
  python tools/convert_to_hf.py --checkpoint runs/tiny_cpu --output exports/tiny

exit codes: 0 done, 2 arguments or configuration, 3 tokenizer, 4 checkpoint
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", required=True, help="a step_... folder, or a checkpoints or run folder (then its latest step)"
    )
    parser.add_argument("--output", required=True, help="folder to make")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="number format (default: that of the run)")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer file or folder, if it has moved since the run")
    parser.add_argument("--force", action="store_true", help="replace an earlier export in the output folder")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Parse the command line, convert, report; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    from megatron_fbt.hf.convert import convert_checkpoint  # here, so that --help does not wait for torch

    try:
        report = convert_checkpoint(
            arguments.checkpoint, arguments.output, arguments.dtype, arguments.tokenizer, arguments.force
        )
    except FBTError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.json:
        print(json.dumps(report))
    else:
        size = f"{report['bytes'] / 1e6:,.1f} MB"
        print(f"{report['checkpoint']} -> {report['output']}: {report['parameters']:,} parameters, {size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
