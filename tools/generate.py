"""Continue a prompt with an exported model, in one of the four regimes."""

import argparse
import json
import sys
from pathlib import Path
from typing import List, Optional

from megatron_fbt.errors import ConfigError, FBTError

EXAMPLE = """example:
  python tools/generate.py --model exports/tiny --regime soft --prompt "def main(" --max_new_tokens 40
  python tools/generate.py --model exports/tiny --regime fused --temperature 0.8 --top_p 0.95 < prompt.txt

The continuation goes to stdout, speed and warnings to stderr.
exit codes: 0 done, 2 arguments, 4 model folder
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder made by tools/convert_to_hf.py")
    parser.add_argument("--regime", choices=("standard", "soft", "fused", "recurrent"), default="soft")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text to continue (default: stdin)")
    prompt.add_argument("--prompt_file", help="UTF-8 file with the text to continue")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--top_k", type=int, default=0, help="0 = off (default)")
    parser.add_argument("--top_p", type=float, default=1.0, help="1 = off (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--fused_passes", type=int, default=1, help="fused passes over the prompt (default: 1)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU where there is one)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt, from wherever it was given."""
    try:
        if arguments.prompt is not None:
            text = arguments.prompt
        elif arguments.prompt_file is not None:
            text = Path(arguments.prompt_file).read_text(encoding="utf-8")
        else:
            text = sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompt cannot be read: {error}") from error
    if not text:
        raise ConfigError("the prompt is empty: give --prompt, --prompt_file or text on stdin")
    return text


def main(argv: Optional[List[str]] = None) -> int:
    """Parse the command line, generate, print; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    from megatron_fbt.inference.text import GenerationOptions, check_model_folder, continue_text, load_model

    names = ("regime", "fused_passes", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
    options = GenerationOptions(**{name: getattr(arguments, name) for name in names})
    try:
        options.validate()
        check_model_folder(arguments.model)
        prompt = read_prompt(arguments)
        model, tokenizer = load_model(arguments.model, arguments.device)
        terminal = sys.stderr if sys.stderr.isatty() else None
        result = continue_text(model, tokenizer, prompt, options, terminal)
    except FBTError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(result) if arguments.json else result["continuation"])
    speed = f"{result['new_tokens']} tokens in {result['seconds']} s ({result['tokens_per_second']} tokens/s)"
    print(f"{result['regime']}: {speed}, {result['finish']}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
