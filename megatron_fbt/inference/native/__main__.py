"""Continue prompts with the model of a training checkpoint, without converting it, in one of the four regimes."""

import argparse
import os
import sys
import traceback
from typing import List, Optional

from megatron_fbt.errors import FBTError

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
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="number format (default: the run's)")
    parser.add_argument("--tokenizer", help="where the tokenizer is, if not in the checkpoint or where the run had it")
    parser.add_argument("--regime", choices=("standard", "soft", "fused", "recurrent"), default="soft")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; repeatable")
    prompt.add_argument("--prompt_file", metavar="FILE", help="UTF-8 file with one text to continue")
    prompt.add_argument("--prompts", metavar="FILE", help="many: JSON Lines (.jsonl), else one prompt a line")
    parser.add_argument("--prompt_key", default="prompt", help="where a JSON line has its prompt (default: prompt)")
    parser.add_argument("--chat", action="store_true", help='prompts are conversations: "messages" of a JSON line')
    parser.add_argument("--batch_size", type=int, default=8, help="prompts continued together (default: 8)")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--top_k", type=int, default=0, help="0 = off (default)")
    parser.add_argument("--top_p", type=float, default=1.0, help="1 = off (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--fused_passes", type=int, default=1, help="fused passes over the prompt (default: 1)")
    parser.add_argument("--json", action="store_true", help="write one JSON object a prompt")
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Parse the command line and generate; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    from megatron_fbt.inference.native.run import NativeRequest, run  # here: --help does not wait for torch
    from megatron_fbt.inference.prompts import PromptSource
    from megatron_fbt.inference.text import GenerationOptions

    names = ("regime", "fused_passes", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
    request = NativeRequest(
        arguments.checkpoint,
        PromptSource(arguments.prompt, arguments.prompt_file, arguments.prompts, arguments.prompt_key, arguments.chat),
        GenerationOptions(**{name: getattr(arguments, name) for name in names}),
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        arguments.dtype,
        arguments.tokenizer,
        arguments.batch_size,
        arguments.json,
    )
    first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        run(request)
    except FBTError as error:
        if getattr(error, "speaks", first_here):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        if getattr(error, "speaks", first_here):
            traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
