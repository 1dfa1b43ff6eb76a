"""Which earlier positions a query sees: documents packed into a row, and sliding windows (method sections 4 and 8)."""

from dataclasses import dataclass
from typing import Optional, Protocol, Tuple

import torch


class KeyValueJoin(Protocol):
    """What a layer's attention does with keys and values before it attends; see core/prefix_reuse.py."""

    def join(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer's queries [s - start, b, ng, hn] -> those that they see, [s, b, ng, hn]."""


@dataclass(frozen=True)
class AttentionMasks:
    """Additive masks, 0 where a query sees a key and -inf elsewhere; None = plain causal.

    [b or 1, 1, s - start, s], for queries from position `start` on.
    """

    full: Optional[torch.Tensor]
    """For layers that see all earlier positions (of their document)."""
    window: Optional[torch.Tensor]
    """For layers with a sliding window."""
    joined: Optional[KeyValueJoin] = None
    """What keys and values are joined with; None = nothing."""


def document_index(document_starts: torch.Tensor) -> torch.Tensor:
    """Number, from 0, of the document that each position of a row lies in: [b, s] bool -> [b, s] int64."""
    return document_starts.long().cumsum(1) - 1


def document_positions(document_starts: torch.Tensor) -> torch.Tensor:
    """Position of each token in its own document: [b, s] bool -> [b, s] int64. Position 0 of a row must be a start."""
    positions = torch.arange(document_starts.size(1), device=document_starts.device).expand_as(document_starts)
    return positions - torch.where(document_starts, positions, 0).cummax(1).values


def attention_masks(
    document_starts: torch.Tensor,
    within_documents: bool,
    window: Optional[int],
    dtype: torch.dtype,
    start: int = 0,
    joined: Optional[KeyValueJoin] = None,
) -> Optional[AttentionMasks]:
    """Masks of one micro-batch; None where plain causal attention is all that any layer needs.

    Args:
        document_starts: [b, s] bool.
        within_documents: no attention across documents.
        window: positions that a query of a windowed layer sees, its own included; None = no layer has a window.
        dtype: of the queries.
        start: position of the first query.
        joined: see AttentionMasks.
    """
    if not within_documents and window is None and start == 0:
        return None if joined is None else AttentionMasks(None, None, joined)
    positions = torch.arange(document_starts.size(1), device=document_starts.device)
    distance = positions[start:, None] - positions  # [s - start, s], query minus key
    seen = (distance >= 0)[None, None]
    if within_documents:
        index = document_index(document_starts)
        seen = seen & (index[:, None, start:, None] == index[:, None, None, :])
    full = _additive(seen, dtype) if within_documents or start else None
    return AttentionMasks(full, None if window is None else _additive(seen & (distance < window), dtype), joined)


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """bool [..., s - start, s] -> 0 where true, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
