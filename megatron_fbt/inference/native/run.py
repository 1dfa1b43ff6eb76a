"""What the command of this package does: everything that can be wrong is checked before processes join."""

import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, TextIO

from megatron_fbt.config.checks import launcher_number
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.cpu import on_gpu
from megatron_fbt.data.chat import ChatEncoder
from megatron_fbt.data.inputs import BadRecord
from megatron_fbt.data.stored_tokenizer import checkpoint_tokenizer
from megatron_fbt.data.token_ids import TokenIds
from megatron_fbt.data.tokenizer import Tokenizer
from megatron_fbt.errors import ConfigError
from megatron_fbt.inference.native.decoding import check_tokens, generate
from megatron_fbt.inference.native.model import NativeModel, load, native_config
from megatron_fbt.inference.prompts import Prompt, PromptSource
from megatron_fbt.inference.sampling import row_seed
from megatron_fbt.inference.text import GenerationOptions
from megatron_fbt.training.messages import hide_gpu_hints, set_up_messages
from megatron_fbt.training.run_folder import find_step_folder
from megatron_fbt.versions import check_megatron_core_version


@dataclass
class NativeRequest:
    """What is asked for.

    Attributes:
        checkpoint: A step's folder, a checkpoints folder or a run folder.
        source: Of the prompts; not standard input, which several processes cannot share.
        options: How to go on from them.
        tensor_model_parallel_size: Processes that share each layer.
        pipeline_model_parallel_size: Stages.
        dtype: "fp32", "bf16" or "fp16"; None = the run's.
        tokenizer: Another place to read the tokenizer from; None = the checkpoint, or where its run had it.
        batch_size: Prompts that are continued together.
        as_json: Write one JSON object a prompt.
    """

    checkpoint: str
    source: PromptSource = field(default_factory=PromptSource)
    options: GenerationOptions = field(default_factory=GenerationOptions)
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    dtype: Optional[str] = None
    tokenizer: Optional[str] = None
    batch_size: int = 8
    as_json: bool = False


def run(request: NativeRequest) -> None:
    """Continue all prompts in order; the first process writes, results to standard output, the rest to standard error.

    An exception from after processes have joined says in its attribute `speaks` whether this one is to print it.

    Raises:
        ConfigError: An option or a prompt without a meaning, or another number of processes than the layout has.
        DataError: The tokenizer cannot be read.
        CheckpointError: The checkpoint cannot be found, is damaged or of another model.
        BadNumbersError: A logit is not finite.
    """
    check_megatron_core_version()
    request.options.validate()
    if request.batch_size < 1:
        raise ConfigError(f"batch_size={request.batch_size}: must be at least 1")
    if not any((request.source.texts, request.source.file, request.source.list_file)):
        raise ConfigError("there is no prompt: give --prompt, --prompt_file or --prompts")
    step = find_step_folder(request.checkpoint)
    sizes = (request.tensor_model_parallel_size, request.pipeline_model_parallel_size)
    config = native_config(step, *sizes, request.dtype)
    contents = request.source.read(sys.stdin)
    tokenizer = checkpoint_tokenizer(step, config, request.tokenizer)
    prompts = _encode(contents, tokenizer, request.source)
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    check_tokens([prompt.ids for prompt in prompts], vocab_size)
    is_main = not launcher_number(os.environ, "RANK")
    set_up_messages(is_main)
    if not on_gpu():
        hide_gpu_hints()
    if is_main:
        _warn_of_length(prompts, request.options, config)
    with load(step, *sizes, request.dtype, vocab_size) as model:
        _continue(model, tokenizer, prompts, request, sys.stdout if is_main else None)


def _encode(contents: List[Any], tokenizer: Tokenizer, source: PromptSource) -> List[Prompt]:
    """Tokens of all prompts; a run without a tokenizer takes ids as words."""
    encode = _encoder(tokenizer, source.chat)
    prompts = []
    for origin, content in zip(source.origins, contents, strict=True):
        try:
            ids = encode(content)
        except (BadRecord, ValueError) as error:
            raise ConfigError(f"{origin}: {error}") from error
        if not ids:
            raise ConfigError(f"{origin}: the prompt is empty: give at least one token")
        prompts.append(Prompt(content, list(ids)))
    return prompts


def _encoder(tokenizer: Tokenizer, chat: bool) -> Callable[[Any], List[int]]:
    if not chat:
        return _ids_as_words if isinstance(tokenizer, TokenIds) else tokenizer.tokenize
    template = tokenizer.saved_chat_template or tokenizer.chat_template
    if template is None:
        raise ConfigError("chat: the checkpoint's tokenizer has no chat template; leave out --chat")
    return ChatEncoder(template, tokenizer).encode_prompt


def _ids_as_words(text: str) -> List[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ConfigError(f"prompt {text!r}: this run has no tokenizer; give ids, as in '5 17 3'") from None


def _warn_of_length(prompts: List[Prompt], options: GenerationOptions, config: PretrainConfig) -> None:
    longest, trained = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens, config.data.sequence_length
    if longest > trained:
        print(f"warning: up to {longest} tokens, the model was trained on rows of {trained}", file=sys.stderr)


def _continue(
    model: NativeModel, tokenizer: Tokenizer, prompts: List[Prompt], request: NativeRequest, out: Optional[TextIO]
) -> None:
    """Batch by batch; `out` is None on the processes that write nothing."""
    options, eos = request.options, tokenizer.eod if tokenizer.eod >= 0 else None
    before: Counter = Counter()
    tokens, seconds = 0, 0.0
    for begin in range(0, len(prompts), request.batch_size):
        batch, seeds = prompts[begin : begin + request.batch_size], []
        for prompt in batch:
            seeds.append(row_seed(options.seed, prompt.ids, before[tuple(prompt.ids)]))
            before[tuple(prompt.ids)] += 1
        counter = _Counter(options.max_new_tokens) if out is not None and sys.stderr.isatty() else None
        began = time.perf_counter()
        found = generate(model, [prompt.ids for prompt in batch], options, eos, seeds, counter)
        elapsed = time.perf_counter() - began
        new = sum(len(result.token_ids) for result in found)
        tokens, seconds = tokens + new, seconds + elapsed
        if out is None:
            continue
        for place, (prompt, result) in enumerate(zip(batch, found, strict=True)):
            facts = {
                "number": begin + place + 1,
                "prompt": prompt.content,
                "continuation": _text_behind(tokenizer, prompt.ids, result.token_ids),
                "regime": options.regime,
                "prompt_tokens": len(prompt.ids),
                "new_tokens": len(result.token_ids),
                "token_ids": result.token_ids,
                "seconds": round(elapsed, 3),
                "tokens_per_second": round(new / elapsed, 1),
                "finish": result.finish,
            }
            _write(facts, len(prompts), request.as_json, out)
    if out is not None:
        speed = f"{tokens:,} tokens in {seconds:.3f} s ({tokens / max(seconds, 1e-3):,.1f} tokens/s)"
        print(f"{options.regime}: {len(prompts):,} prompts, {speed}", file=sys.stderr)


def _write(facts: Dict[str, Any], count: int, as_json: bool, out: TextIO) -> None:
    if as_json:
        out.write(json.dumps(facts) + "\n")
    else:
        head = f"--- {facts['number']} of {count}\n" if count > 1 else ""
        out.write(f"{head}{facts['continuation']}\n")
    out.flush()


def _text_behind(tokenizer: Tokenizer, prompt: List[int], new: List[int]) -> str:
    """Text of the new tokens as it stands behind the prompt's (a leading blank is kept)."""
    before, whole = tokenizer.detokenize(prompt), tokenizer.detokenize(prompt + new)
    return whole[len(before) :] if whole.startswith(before) else tokenizer.detokenize(new)


class _Counter:
    """Shows on a terminal how many tokens there are so far."""

    def __init__(self, total: int) -> None:
        self.total, self.count = total, 0

    def __call__(self, tokens: List[Optional[int]]) -> None:
        self.count += 1
        sys.stderr.write(f"\r{self.count}/{self.total} tokens" if self.count < self.total else "\r\033[K")
        sys.stderr.flush()
