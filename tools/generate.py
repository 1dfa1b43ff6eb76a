"""Continue prompts with an exported model, in one of the four regimes."""

import argparse
import sys
from typing import List, Optional

from megatron_fbt.ending import tell
from megatron_fbt.errors import FBTError
from megatron_fbt.inference.command_line import add_generation_options, generation_options, prompt_source

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
    add_generation_options(parser, stdin=True)
    parser.add_argument("--batch_size", type=int, help="prompts continued together (default: 8)")
    parser.add_argument("--gate_table", action="store_true", help="compute all tokens' gates once: faster decoding")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU where there is one)")
    parser.add_argument("--stream", action="store_true", help="write text as it comes, one prompt after the other")
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Parse the command line and generate; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    from megatron_fbt.inference.run_generate import GenerationRequest, run

    request = GenerationRequest(
        arguments.model,
        prompt_source(arguments),
        generation_options(arguments, gate_table=arguments.gate_table),
        arguments.batch_size,
        arguments.device,
        arguments.json,
        arguments.stream,
    )
    try:
        run(request)
    except FBTError as error:
        return tell(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
