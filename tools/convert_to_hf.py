"""Export a training checkpoint as a folder that Hugging Face transformers loads by itself."""

import argparse
import json
import sys
from typing import List, Optional

from megatron_fbt.ending import tell
from megatron_fbt.errors import FBTError

EXAMPLE = """examples:
  python tools/convert_to_hf.py --checkpoint runs/tiny_cpu --output exports/tiny --verify
  python tools/convert_to_hf.py --checkpoint runs/tiny_cpu --output exports/plain --format llama --dtype bf16

exit codes: 0 done, 2 arguments or configuration, 3 tokenizer, 4 checkpoint, 6 the logits differ too much (--verify)
"""
DIFFERS = 6


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", required=True, help="a step_... folder, or a checkpoints or run folder (then its latest step)"
    )
    parser.add_argument("--output", required=True, help="folder to make")
    parser.add_argument(
        "--format",
        choices=("fbt", "llama"),
        help="fbt: all regimes, with code of its own (trust_remote_code); llama: plain mode without feedback, as "
        "LlamaForCausalLM or the stock class that has the options in use (default: llama for a run that never had a "
        "step of several passes, else fbt)",
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="number format (default: that of the run)")
    parser.add_argument("--max_shard_size", metavar="SIZE", default="5GB", help="largest file (default: %(default)s)")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer file or folder (default: the checkpoint's own)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare logits with those of the training model, for 1 to the trained number of passes; both models are "
        "held in memory in float32, one after the other",
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export in the output folder")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Parse the command line, convert, report; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    from megatron_fbt.hf.convert import Conversion, convert_checkpoint, describe  # here: --help does not wait for torch

    conversion = Conversion(
        dtype=arguments.dtype,
        format=arguments.format,
        tokenizer_path=arguments.tokenizer,
        max_shard_size=arguments.max_shard_size,
        verify=arguments.verify,
        force=arguments.force,
    )
    try:
        report = convert_checkpoint(arguments.checkpoint, arguments.output, conversion)
    except FBTError as error:
        return tell(error)
    for note in report["notes"]:
        print(f"warning: {note}", file=sys.stderr)
    print(json.dumps(report) if arguments.json else describe(report))
    return DIFFERS if report["verification"] is not None and not report["verification"]["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
