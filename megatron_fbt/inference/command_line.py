"""Options that the commands which continue prompts have in common; importing this does not import torch."""

import argparse
from typing import Any


def add_generation_options(parser: argparse.ArgumentParser, stdin: bool) -> None:
    """Prompts, regime and sampling.

    Args:
        parser: of the command.
        stdin: whether the text to continue may also come from there.
    """
    parser.add_argument("--regime", choices=("standard", "soft", "fused", "recurrent"), default="soft")
    prompt = parser.add_mutually_exclusive_group(required=not stdin)
    otherwise = " (else stdin)" if stdin else ""
    prompt.add_argument("--prompt", action="append", metavar="TEXT", help=f"text to continue; repeatable{otherwise}")
    prompt.add_argument("--prompt_file", metavar="FILE", help="UTF-8 file with one text to continue")
    prompt.add_argument("--prompts", metavar="FILE", help="many: JSON Lines (.jsonl), else one prompt a line")
    parser.add_argument("--prompt_key", default="prompt", help="where a JSON line has its prompt (default: prompt)")
    parser.add_argument("--chat", action="store_true", help='prompts are conversations: "messages" of a JSON line')
    parser.add_argument("--max_new_tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--top_k", type=int, default=0, help="0 = off (default)")
    parser.add_argument("--top_p", type=float, default=1.0, help="1 = off (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--fused_passes", type=int, default=1, help="fused passes over the prompt (default: 1)")
    parser.add_argument("--json", action="store_true", help="write one JSON object a prompt")


def prompt_source(arguments: argparse.Namespace) -> Any:
    """The PromptSource that the options ask for."""
    from megatron_fbt.inference.prompts import PromptSource  # here: --help does not wait for torch

    return PromptSource(
        arguments.prompt, arguments.prompt_file, arguments.prompts, arguments.prompt_key, arguments.chat
    )


def generation_options(arguments: argparse.Namespace, **more: Any) -> Any:
    """The GenerationOptions that the options ask for, with `more` of a command's own."""
    from megatron_fbt.inference.text import GenerationOptions

    names = ("regime", "fused_passes", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
    return GenerationOptions(**{name: getattr(arguments, name) for name in names}, **more)
