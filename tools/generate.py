"""Continue prompts with an exported model, in one of the four regimes."""

import argparse
import sys
from typing import List, Optional

from megatron_fbt.errors import FBTError

EXAMPLE = """examples:
  python tools/generate.py --model exports/tiny --regime soft --prompt "def main(" --max_new_tokens 40
  python tools/generate.py --model exports/tiny --regime fused --temperature 0.8 --top_p 0.95 < prompt.txt
  python tools/generate.py --model exports/tiny --prompts prompts.jsonl --batch_size 16 --gate_table --json > out.jsonl

Continuations go to stdout in the order of the prompts, each batch when it is done; speed and warnings to stderr. With a
seed, the text of a prompt does not depend on the prompts beside it.
exit codes: 0 done, 2 arguments or prompts, 3 tokenizer, 4 model folder, 5 logits that are not finite
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder made by tools/convert_to_hf.py")
    parser.add_argument("--regime", choices=("standard", "soft", "fused", "recurrent"), default="soft")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; repeatable (else stdin)")
    prompt.add_argument("--prompt_file", metavar="FILE", help="UTF-8 file with one text to continue")
    prompt.add_argument("--prompts", metavar="FILE", help="many: JSON Lines (.jsonl), else one prompt a line")
    parser.add_argument("--prompt_key", default="prompt", help="where a JSON line has its prompt (default: prompt)")
    parser.add_argument("--chat", action="store_true", help='prompts are conversations: "messages" of a JSON line')
    parser.add_argument("--batch_size", type=int, help="prompts continued together (default: 8)")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--top_k", type=int, default=0, help="0 = off (default)")
    parser.add_argument("--top_p", type=float, default=1.0, help="1 = off (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--fused_passes", type=int, default=1, help="fused passes over the prompt (default: 1)")
    parser.add_argument("--gate_table", action="store_true", help="compute all tokens' gates once: faster decoding")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU where there is one)")
    parser.add_argument("--stream", action="store_true", help="write text as it comes, one prompt after the other")
    parser.add_argument("--json", action="store_true", help="write one JSON object a prompt")
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Parse the command line and generate; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    from megatron_fbt.inference.prompts import PromptSource  # here: --help does not wait for torch
    from megatron_fbt.inference.run_generate import GenerationRequest, run
    from megatron_fbt.inference.text import GenerationOptions

    names = ("regime", "fused_passes", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "gate_table")
    request = GenerationRequest(
        arguments.model,
        PromptSource(arguments.prompt, arguments.prompt_file, arguments.prompts, arguments.prompt_key, arguments.chat),
        GenerationOptions(**{name: getattr(arguments, name) for name in names}),
        arguments.batch_size,
        arguments.device,
        arguments.json,
        arguments.stream,
    )
    try:
        run(request)
    except FBTError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
