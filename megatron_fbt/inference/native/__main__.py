"""Continue prompts with the model of a training checkpoint, without converting it, in one of the four regimes."""

import argparse
import sys
from typing import List, Optional

from megatron_fbt.ending import end_rank
from megatron_fbt.inference.command_line import add_generation_options, generation_options, prompt_source

EXAMPLE = """examples:
  python -m megatron_fbt.inference.native --checkpoint runs/demo/run --regime soft --prompt "def main("
  python -m megatron_fbt.launch --nproc_per_node 4 -m megatron_fbt.inference.native --checkpoint runs/demo/run \\
      --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --prompts prompts.jsonl --json

The checkpoint may come from any layout; this command has its own, of as many processes as the launcher starts.
Continuations go to stdout in the order of the prompts, each batch when it is done; speed and warnings to stderr. With a
seed, the text of a prompt does not depend on the prompts beside it.
exit codes: 0 done, 1 another error, 2 arguments, prompts or layout, 3 tokenizer, 4 checkpoint, 5 logits that are not
finite
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fbt.inference.native",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", required=True, help="a run's folder, or that of one step")
    parser.add_argument("--tensor_model_parallel_size", type=int, default=1, help="default: 1")
    parser.add_argument("--pipeline_model_parallel_size", type=int, default=1, help="default: 1")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="number format (default: the run's)")
    parser.add_argument("--tokenizer", help="where the tokenizer is, if not in the checkpoint or where the run had it")
    add_generation_options(parser, stdin=False)
    parser.add_argument("--batch_size", type=int, default=8, help="prompts continued together (default: 8)")
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Parse the command line and generate; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    from megatron_fbt.inference.native.run import NativeRequest, run  # here: --help does not wait for torch

    request = NativeRequest(
        arguments.checkpoint,
        prompt_source(arguments),
        generation_options(arguments),
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        arguments.dtype,
        arguments.tokenizer,
        arguments.batch_size,
        arguments.json,
    )
    try:
        run(request)
    except Exception as error:
        return end_rank(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
