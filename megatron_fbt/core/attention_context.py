"""What attention needs to know of a micro-batch beside the hidden states: positions and what a query may see."""

from typing import Any, Dict, Optional

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.backends import backend_of
from megatron_fbt.model.attention_mask import KeyValueJoin, attention_masks, document_positions


class AttentionContext:
    """Rotary angles and masks, in the form that the layer backend takes.

    Args:
        config: sections model and data are used.
        mcore: Megatron-Core's configuration.
        cp_group: context-parallel group.
    """

    def __init__(self, config: PretrainConfig, mcore: TransformerConfig, cp_group: torch.distributed.ProcessGroup):
        self.within_documents = config.data.reset_attention_mask
        self.restarts = config.data.reset_position_ids
        self.window = config.model.sliding_window
        self.packed = backend_of(config) == "transformer_engine"
        self.rotary = RotaryEmbedding(
            kv_channels=mcore.kv_channels,
            rotary_percent=1.0,
            rotary_base=config.model.rotary_base,
            use_cpu_initialization=mcore.use_cpu_initialization,
            cp_group=cp_group,
        )

    def of(
        self,
        document_starts: torch.Tensor,
        dtype: torch.dtype,
        start: int = 0,
        joined: Optional[KeyValueJoin] = None,
    ) -> Dict[str, Any]:
        """Arguments of the transformer block for one micro-batch.

        Args:
            document_starts: [b, s] bool.
            dtype: of the hidden states.
            start: first position that the layers compute; 0 with Transformer Engine.
            joined: see AttentionMasks; None with Transformer Engine.
        """
        rotary = self.rotary(document_starts.size(1))  # [s, 1, 1, hn]
        if self.packed:  # Transformer Engine masks causally and by the configured window itself
            packed = packed_documents(document_starts) if self.within_documents else None
            return {"attention_mask": None, "rotary_pos_emb": rotary, "packed_seq_params": packed}
        if self.restarts:
            rotary = rotary[:, 0, 0][document_positions(document_starts).t()].unsqueeze(2)  # [s, b, 1, hn]
        masks = attention_masks(document_starts, self.within_documents, self.window, dtype, start, joined)
        return {"attention_mask": masks, "rotary_pos_emb": rotary[start:]}


def packed_documents(document_starts: torch.Tensor) -> PackedSeqParams:
    """The documents of one row as sequences of a packed batch, each with positions of its own.

    Args:
        document_starts: [1, s] bool.
    """
    starts = document_starts[0].nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([document_starts.size(1)])]).int()
    longest = int(ends.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
