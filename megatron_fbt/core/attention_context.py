"""What attention needs to know of a micro-batch beside the hidden states: positions and what a query may see."""

from typing import Any, Dict, Optional

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.backends import backend_of
from megatron_fbt.model.attention_mask import AttentionMasks, KeyValueJoin, attention_masks, document_positions


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
        host_starts: Optional[torch.Tensor] = None,
    ) -> Dict[str, Any]:
        """Arguments of the transformer block for one micro-batch.

        Args:
            document_starts: [b, s] bool.
            dtype: of the hidden states.
            start: first position that the layers compute.
            joined: see AttentionMasks.
            host_starts: document_starts in the CPU's memory; None = they are read back where they are needed.
        """
        rotary = self.rotary(document_starts.size(1))  # [s, 1, 1, hn]
        if self.packed:  # Transformer Engine masks causally and by the configured window itself
            packed = None
            if self.within_documents:
                packed = packed_documents(document_starts if host_starts is None else host_starts, rotary.device)
            masks = None if joined is None else AttentionMasks(None, None, joined)
            return {"attention_mask": masks, "rotary_pos_emb": rotary[start:], "packed_seq_params": packed}
        if self.restarts:
            rotary = rotary[:, 0, 0][document_positions(document_starts).t()].unsqueeze(2)  # [s, b, 1, hn]
        masks = attention_masks(document_starts, self.within_documents, self.window, dtype, start, joined)
        return {"attention_mask": masks, "rotary_pos_emb": rotary[start:]}


def packed_documents(document_starts: torch.Tensor, device: torch.device) -> PackedSeqParams:
    """The documents of one row as sequences of a packed batch, each with positions of its own.

    Args:
        document_starts: [1, s] bool, in the CPU's memory, so that no device is waited for.
        device: of the layers.
    """
    (row,) = document_starts.tolist()
    begins = [position for position, begin in enumerate(row) if begin] + [len(row)]
    longest = max(end - begin for begin, end in zip(begins, begins[1:]))
    ends = torch.tensor(begins, dtype=torch.int32).to(device, non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
