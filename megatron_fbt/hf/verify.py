"""Whether an export computes what the training model computes: logits of both, in float32, on the same tokens.

Where the export holds the checkpoint's weights as they are, logits may differ by rounding errors of the computation
alone. Where weights were rounded on their way, the distributions are compared.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from megatron_fbt.analysis.rows import indexed_rows
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.prefixes import indexed_pairs
from megatron_fbt.errors import FBTError
from megatron_fbt.hf.modeling_fbt import FBTForCausalLM
from megatron_fbt.hf.native import native_logits

EXACT = 1e-4
"""Largest difference of logits where weights are as they were, in multiples of the largest logit (at least of 1)."""
ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-4}
"""Largest mean KL divergence in nats where weights were rounded to a format."""
MOST_LOGITS = 1 << 26
"""Of all passes together: 256 MB."""
ROWS, LENGTH = 8, 256


@dataclass
class VerificationTokens:
    """What both models read.

    Attributes:
        ids: [N, T].
        starts: [N, T] bool, where documents begin.
        source: For the report.
    """

    ids: Tensor
    starts: Tensor
    source: str


def verify_export(
    folder: Path,
    exported: PretrainedConfig,
    checkpoint: Path,
    config: PretrainConfig,
    eod: int,
    dtype: torch.dtype,
    rounded: bool,
) -> Dict[str, Any]:
    """Compare the export in a folder with its checkpoint, for every number of passes up to the trained one.

    Args:
        folder: Holds the weights; config.json need not be there yet.
        exported: The export's configuration.
        checkpoint: The step's folder.
        config: The run's configuration.
        eod: Id that ends a document; negative = none.
        dtype: Number format of the exported weights.
        rounded: Whether weights were rounded on their way into the export.

    Returns:
        source, rows, tokens, passes (a list of passes, max_abs_difference, kl, top1_agreement), limits, passed.
    """
    with_feedback = exported.model_type == FBTForCausalLM.config_class.model_type
    passes = config.feedback.max_passes if with_feedback else 1
    chosen = choose_tokens(config, exported.vocab_size, passes, eod)
    if not with_feedback:  # a stock class knows one document a row
        chosen.starts = torch.zeros_like(chosen.starts)
    native = native_logits(checkpoint, config, exported.vocab_size, chosen.ids, chosen.starts, passes)
    model, table, passed = _load(folder, exported), [], True
    for number, expected in enumerate(native, start=1):
        options = {"passes": number, "document_starts": chosen.starts} if with_feedback else {}
        found = compare_logits(expected, _logits(model, chosen.ids, options))
        scale = max(1.0, expected.abs().max().item())
        within = found["kl"] <= ROUNDED[dtype] if rounded else found["max_abs_difference"] <= EXACT * scale
        passed = passed and within
        table.append({"passes": number, **found})
    if rounded:
        limits = f"Weights were rounded to {str(dtype).removeprefix('torch.')}: KL up to {ROUNDED[dtype]:g} passes"
    else:
        limits = f"Weights are those of the checkpoint: differences up to {EXACT:g} of the largest logit pass"
    facts = {"source": chosen.source, "rows": len(chosen.ids), "tokens": chosen.ids.numel()}
    return {**facts, "passes": table, "limits": limits, "passed": passed}


def choose_tokens(config: PretrainConfig, vocab_size: int, passes: int, eod: int) -> VerificationTokens:
    """Validation rows of the run's data where these are still there, else random ids."""
    length = max(2, min(config.data.sequence_length, LENGTH, MOST_LOGITS // (passes * vocab_size)))
    rows = min(ROWS, max(1, MOST_LOGITS // (passes * vocab_size * length)))
    for path, split in indexed_pairs(config.data):
        try:
            end = eod if eod >= 0 else None
            found = indexed_rows(path, vocab_size, split, end, rows, length, seed=0)
        except (FBTError, OSError):
            continue
        return VerificationTokens(found.input_ids, found.document_starts, f"validation rows of {Path(path).name}")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (rows, length), generator=generator)
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[1::2, length // 3] = True
    return VerificationTokens(ids, starts, "random ids: the run's indexed data are not there")


def compare_logits(expected: Tensor, found: Tensor) -> Dict[str, float]:
    """Distance of logits [N, T, V].

    Returns:
        max_abs_difference; kl, the mean of KL(expected || found) in nats; top1_agreement, a share.
    """
    largest, divergence, same = 0.0, 0.0, 0
    for left, right in zip(expected, found, strict=True):
        gap = (left - right).abs().max().item()
        largest = gap if not gap <= largest else largest  # NaN stays
        left, right = left.double().log_softmax(-1), right.double().log_softmax(-1)
        divergence += (left.exp() * (left - right)).sum().item()
        same += int((left.argmax(-1) == right.argmax(-1)).sum())
    count = expected[..., 0].numel()
    return {"max_abs_difference": largest, "kl": max(divergence / count, 0.0), "top1_agreement": same / count}


def _load(folder: Path, exported: PretrainedConfig) -> Any:
    """The exported model in float32."""
    own = exported.model_type == FBTForCausalLM.config_class.model_type
    architecture = FBTForCausalLM if own else getattr(transformers, exported.architectures[0])
    transformers.utils.logging.disable_progress_bar()
    try:
        return architecture.from_pretrained(str(folder), config=exported, local_files_only=True).float().eval()
    finally:
        transformers.utils.logging.enable_progress_bar()


@torch.no_grad()
def _logits(model: Any, ids: Tensor, options: Dict[str, Any]) -> Tensor:
    """[N, T, V], row by row."""
    found = []
    for number in range(len(ids)):
        own = {name: value[number, None] if isinstance(value, Tensor) else value for name, value in options.items()}
        found.append(model(ids[number, None], use_cache=False, **own).logits)
    return torch.cat(found)
