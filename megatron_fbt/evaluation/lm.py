"""The model type `fbt` of lm-eval: an exported model in one regime. Importing this module registers it."""

import copy
import sys
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows

from megatron_fbt.analysis.progress import PieceProgress
from megatron_fbt.errors import ConfigError
from megatron_fbt.evaluation.decoding import Continuation, Decoding, continue_prompts
from megatron_fbt.evaluation.likelihood import Passes, ScoredRow, log_likelihoods
from megatron_fbt.evaluation.options import check_model_options, parse_passes
from megatron_fbt.hf.generation_fbt import check_sampling
from megatron_fbt.inference.text import load_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GENERATION_KEYS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


@dataclass
class Trace:
    """One continuation, and which request it belongs to."""

    task: str
    document: int
    repeat: int
    continuation: Continuation


@register_model("fbt")
class FBTLM(TemplateLM):
    """An exported model in one regime.

    Args:
        pretrained: Folder made by tools/convert_to_hf.py.
        regime: standard, soft, fused or recurrent.
        fused_passes: Fused passes over the prompt in the fused regime.
        passes: Parallel passes for log-likelihoods in a feedback regime, or "exact" for the recurrence.
        error_sample: Requests whose log-likelihood is computed by the recurrence too, to tell the error of the passes.
        batch_size: Rows computed together.
        device: None = the GPU where there is one.
        dtype: fp32, bf16, fp16, or auto = as the weights are stored.
        max_length: Most tokens of a row; None = what the model was trained on.
        seed: Of sampling.

    Raises:
        ConfigError: An argument without a meaning.
        CheckpointError: The folder holds no exported model with a tokenizer.
    """

    def __init__(
        self,
        pretrained: str,
        regime: str = "soft",
        fused_passes: int = 1,
        passes: Union[int, str] = 4,
        error_sample: int = 16,
        batch_size: int = 8,
        device: Optional[str] = None,
        dtype: str = "auto",
        max_length: Optional[int] = None,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown := sorted(name for name, value in unknown.items() if value is not None):
            raise ConfigError(f"{unknown[0]}: no argument of the model type fbt")
        batch_size = int(batch_size) if str(batch_size).isdigit() else batch_size
        check_model_options(pretrained, regime, fused_passes, passes, error_sample, batch_size, dtype, max_length, seed)
        self.network, self.tokenizer = load_model(pretrained, device)
        if dtype != "auto":
            self.network = self.network.to(DTYPES[dtype])
        self.pretrained, self.batch_size, self.seed, self.error_sample = pretrained, batch_size, seed, error_sample
        self._device = self.network.device
        self.max_length = max_length or self.network.config.max_position_embeddings
        self.how = Passes(regime, fused_passes, parse_passes(passes))
        self.forget()

    def in_regime(self, regime: str) -> "FBTLM":
        """The same network in another regime."""
        other = copy.copy(self)
        other.how = copy.copy(self.how)
        other.how.regime = regime
        other.forget()
        return other

    def forget(self) -> None:
        """Empty what is recorded of the requests: traces, errors of the passes, cut rows."""
        self.traces: List[Trace] = []
        self.errors: List[float] = []
        self.cut = 0

    @property
    def eot_token_id(self) -> int:
        end = self.network.generation_config.eos_token_id
        end = end[0] if isinstance(end, list) else end
        return 0 if end is None else end

    @property
    def tokenizer_name(self) -> str:
        return str(self.pretrained).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: Optional[bool] = None, **kwargs: Any) -> List[int]:
        return self.tokenizer(string, add_special_tokens=False, verbose=False).input_ids

    def apply_chat_template(self, chat_history: List[Dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> List[Tuple[float, bool]]:
        """(log-likelihood, is it the greedy continuation) of each (context, continuation)."""
        return super().loglikelihood(list(requests), disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[Tuple], **kwargs: Any) -> List[Tuple[float, bool]]:
        rows = [self._row(list(context), list(continuation), len(context)) for _, context, continuation in requests]
        return self._score(rows, "requests")

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> List[float]:
        """Log-likelihood of whole texts, in windows of max_length tokens; the first token of each is its prompt."""
        rows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for before, scored in get_rolling_token_windows(ids, self.eot_token_id, self.max_length, 1):
                ids_here = before + scored[-1:]
                rows.append(ScoredRow(ids_here, 1, len(ids_here) - len(scored)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._score(rows, "windows")):
            totals[owner] += value
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> List[str]:
        """Text after each prompt up to a stop string."""
        seen: Dict[Any, int] = {}
        jobs = []
        for number, request in enumerate(requests):
            context, settings = request.args
            key = (request.task_name, request.doc_id, request.idx)
            repeat = seen[key] = seen.get(key, -1) + 1
            jobs.append((number, self._prompt(context, settings), settings, (*key, repeat)))
        groups: Dict[str, List[Tuple]] = {}
        for job in sorted(jobs, key=lambda job: (-len(job[1]), job[0])):
            groups.setdefault(repr(sorted(job[2].items(), key=str)), []).append(job)
        found: List[Optional[Continuation]] = [None] * len(requests)
        with PieceProgress(len(jobs), f"continuations ({self.how.regime})") as progress:
            for group in groups.values():
                for start in range(0, len(group), self.batch_size):
                    batch = group[start : start + self.batch_size]
                    for job, continuation in zip(batch, self._continue(batch)):
                        found[job[0]] = continuation
                        progress.advance()
        for number, _, _, (task, document, _, repeat) in jobs:
            self.traces.append(Trace(task, document, repeat, found[number]))
        return [continuation.text for continuation in found]

    def _prompt(self, context: str, settings: Dict[str, Any]) -> List[int]:
        """Token ids of a prompt, cut on the left where it does not fit."""
        ids = self.tok_encode(context) or [self.eot_token_id]
        room = self.max_length - decoding_of(settings).max_new_tokens
        if room < 1:
            raise ConfigError(
                f"max_gen_toks={settings['max_gen_toks']}: leaves no room for a prompt in max_length={self.max_length}"
            )
        self.cut += len(ids) > room
        return ids[-room:]

    def _continue(self, batch: Sequence[Tuple]) -> List[Continuation]:
        prompts, settings = [job[1] for job in batch], batch[0][2]
        seeds = [zlib.crc32(repr((self.seed, *job[3])).encode()) for job in batch]
        decoding = decoding_of(settings)
        return continue_prompts(
            self.network, self.tokenizer, prompts, seeds, decoding, self.how.regime, self.how.fused_passes
        )

    def _row(self, context: List[int], continuation: List[int], prompt: int) -> ScoredRow:
        """A request as a row, cut on the left where it does not fit."""
        ids = context + continuation
        excess = max(0, len(ids) - 1 - self.max_length)  # the last token is never read
        if excess >= prompt:
            raise ConfigError(
                f"max_length={self.max_length}: a continuation of {len(continuation)} tokens does not fit; "
                "give a larger one"
            )
        self.cut += excess > 0
        return ScoredRow(ids[excess:], prompt - excess, prompt - excess)

    def _score(self, rows: Sequence[ScoredRow], what: str) -> List[Tuple[float, bool]]:
        """Log-likelihoods in the order of the rows; records the error of the passes on some of them."""
        results: List[Tuple[float, bool]] = [(0.0, True)] * len(rows)
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))
        self._compute(rows, order, self.how, results, f"{what} ({self.how.regime})")
        if self.how.passes is not None and self.how.regime != "standard" and self.error_sample and rows:
            step = max(1, -(-len(rows) // self.error_sample))
            exact = list(results)
            how = Passes(self.how.regime, self.how.fused_passes, None)
            self._compute(rows, order[::step], how, exact, f"{what} by the recurrence ({self.how.regime})")
            self.errors += [abs(results[number][0] - exact[number][0]) for number in order[::step]]
        return results

    def _compute(
        self, rows: Sequence[ScoredRow], order: Sequence[int], how: Passes, results: List[Tuple[float, bool]], what: str
    ) -> None:
        with PieceProgress(len(order), what) as progress:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                for number, found in zip(batch, log_likelihoods(self.network, [rows[n] for n in batch], how)):
                    results[number] = found
                    progress.advance()


def decoding_of(settings: Dict[str, Any]) -> Decoding:
    """The decoding that a task's generation_kwargs ask for.

    Raises:
        ConfigError: They hold something else than what is known, or a value without a meaning.
    """
    if unknown := sorted(set(settings) - GENERATION_KEYS):
        raise ConfigError(
            f"generation_kwargs: {unknown[0]} is not known; known are {', '.join(sorted(GENERATION_KEYS))}"
        )
    until = settings.get("until") or []
    sample = settings.get("do_sample", False)
    try:
        decoding = Decoding(
            tuple(text for text in ([until] if isinstance(until, str) else until) if text),
            int(settings.get("max_gen_toks", 256)),
            float(settings.get("temperature", 1.0)) if sample else 0.0,
            int(settings.get("top_k", 0)),
            float(settings.get("top_p", 1.0)),
        )
        check_sampling(decoding.temperature, decoding.top_k, decoding.top_p)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"generation_kwargs {settings}: {error}; correct the task file") from error
    if decoding.max_new_tokens < 1:
        raise ConfigError(f"generation_kwargs: max_gen_toks={decoding.max_new_tokens}: must be at least 1")
    return decoding


def facts(lm: FBTLM) -> Dict[str, Any]:
    """What the model was, for the report."""
    return {
        **asdict(lm.how),
        "pretrained": str(lm.pretrained),
        "device": str(lm.device),
        "dtype": str(lm.network.dtype).removeprefix("torch."),
        "batch_size": lm.batch_size,
        "max_length": lm.max_length,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
