"""What tools/generate.py does: everything that can be wrong is checked before the weights are read."""

import json
import sys
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Optional, TextIO

from megatron_fbt.errors import ConfigError
from megatron_fbt.inference.batches import continue_prompts
from megatron_fbt.inference.prompts import PromptSource, encode_prompts
from megatron_fbt.inference.text import (
    GenerationOptions,
    check_device,
    check_model_folder,
    load_network,
    load_tokenizer,
)


@dataclass
class GenerationRequest:
    """What is asked for.

    Attributes:
        model: Folder made by tools/convert_to_hf.py.
        source: Of the prompts.
        options: How to go on from them.
        batch_size: Prompts that are continued together; None = 8, or 1 where text is streamed.
        device: None = the GPU where there is one.
        as_json: Write one JSON object a prompt.
        stream: Write text as it comes.
    """

    model: str
    source: PromptSource = field(default_factory=PromptSource)
    options: GenerationOptions = field(default_factory=GenerationOptions)
    batch_size: Optional[int] = None
    device: Optional[str] = None
    as_json: bool = False
    stream: bool = False

    def validate(self) -> None:
        """Check what can be checked without files.

        Raises:
            ConfigError: A value without a meaning, or two that exclude each other.
        """
        self.options.validate()
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: must be at least 1")
        if self.stream and self.as_json:
            raise ConfigError("stream: JSON is written when a text is complete; leave out --json or --stream")
        if self.stream and (self.batch_size or 1) > 1:
            raise ConfigError(f"stream: batch_size={self.batch_size} texts cannot be written at once; leave one out")
        check_device(self.device)


def run(request: GenerationRequest, out: Optional[TextIO] = None, messages: Optional[TextIO] = None) -> None:
    """Continue all prompts in order; each batch is written when it is done, speed and warnings go to `messages`.

    Args:
        request: What is asked for.
        out: For continuations; None = standard output.
        messages: None = standard error.

    Raises:
        ConfigError: An option or a prompt without a meaning.
        CheckpointError: The folder holds no exported model, or a damaged one.
        BadNumbersError: A logit is not finite.
    """
    out, messages = out or sys.stdout, messages or sys.stderr
    request.validate()
    check_model_folder(request.model)
    contents = request.source.read(sys.stdin)
    tokenizer = load_tokenizer(request.model)
    prompts = encode_prompts(contents, tokenizer, request.model, request.source)
    model = load_network(request.model, request.device)
    batch_size = request.batch_size or (1 if request.stream else 8)
    terminal = messages if messages.isatty() and not request.stream else None
    if request.options.gate_table:
        try:
            model.build_gate_table()
        except ValueError as error:
            raise ConfigError(str(error)) from error
    stream = _Headed(out, len(prompts)) if request.stream else None
    batches = continue_prompts(model, tokenizer, prompts, request.options, batch_size, terminal, stream)
    print(_summary(_written(batches, request, len(prompts), out, stream)), file=messages)


class _Headed:
    """Standard output with a line before each of several texts."""

    def __init__(self, out: TextIO, count: int) -> None:
        self.out, self.count, self.number, self.open = out, count, 0, False

    def write(self, text: str) -> None:
        if not self.open:
            self.number, self.open = self.number + 1, True
            self.out.write(_head(self.number, self.count))
        self.out.write(text)

    def flush(self) -> None:
        self.out.flush()

    def close_text(self) -> None:
        """The text is complete."""
        self.write("\n")
        self.open = False


def _head(number: int, count: int) -> str:
    return f"--- {number} of {count}\n" if count > 1 else ""


def _written(
    batches: Iterator[List[Dict[str, Any]]], request: GenerationRequest, count: int, out: TextIO, stream: Any
) -> List[List[Dict[str, Any]]]:
    """Write every batch as it comes; all of them."""
    done = []
    for batch in batches:
        for result in batch:
            if request.as_json:
                out.write(json.dumps(result) + "\n")
            elif stream is None:
                out.write(_head(result["number"], count) + result["continuation"] + "\n")
            else:
                stream.close_text()
        out.flush()
        done.append(
            [{name: result[name] for name in ("new_tokens", "seconds", "finish", "regime")} for result in batch]
        )
    return done


def _summary(batches: List[List[Dict[str, Any]]]) -> str:
    results = [result for batch in batches for result in batch]
    tokens, seconds = sum(result["new_tokens"] for result in results), sum(batch[0]["seconds"] for batch in batches)
    speed = f"{tokens:,} tokens in {seconds:.3f} s ({tokens / max(seconds, 1e-3):,.1f} tokens/s)"
    if len(results) == 1:
        return f"{results[0]['regime']}: {speed}, {results[0]['finish']}"
    ended = sum(result["finish"] == "eos" for result in results)
    return f"{results[0]['regime']}: {len(results):,} prompts, {speed}; {ended:,} ended, {len(results) - ended:,} cut"
