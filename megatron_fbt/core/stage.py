"""One pipeline stage of a Full-Bandwidth Transformer, composed of Megatron-Core's parts.

Shapes: s sequence, b micro batch, h hidden; states between stages are [s/tp, b, h] under sequence parallelism.
"""

import contextlib
from typing import Dict, Iterator, List, Optional, Tuple

import torch
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fbt.config.deepspeed import ZERO_STAGES
from megatron_fbt.config.feedback import resolved_input_scale
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.reuse import reuses_prefix
from megatron_fbt.core.attention_context import AttentionContext
from megatron_fbt.core.backends import as_here
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.recompute import set_recompute
from megatron_fbt.core.specs import block_spec, column_linear, fusion_context, transformer_config
from megatron_fbt.model.attention_mask import KeyValueJoin
from megatron_fbt.model.chunked_loss import LossShard, chunked_loss
from megatron_fbt.model.embedding import BufferedEmbedding
from megatron_fbt.model.fusion import build_fusion
from megatron_fbt.model.initialise import global_name, initialise_parameters
from megatron_fbt.model.layers import rms_normalize
from megatron_fbt.model.loss import token_losses, token_losses_and_normalizers


class FBTStage(LanguageModule):
    """Embedding and fusion (first stage), layers, final norm and output head (last stage).

    Args:
        config: the whole configuration.
        layout: this process's place.
        vocab_size: entries of the vocabulary.
        padded_vocab_size: rows of embedding and head.
    """

    def __init__(self, config: PretrainConfig, layout: Layout, vocab_size: int, padded_vocab_size: int):
        mcore: TransformerConfig = transformer_config(config)
        super().__init__(config=mcore, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
        self.layout = layout
        self.vocab_size = vocab_size
        self.input_norm, self.memory = config.model.input_norm, config.memory
        self.one_backward = config.optimizer.sharding in ZERO_STAGES  # DeepSpeed shards a gradient when it comes
        self.pre_process, self.post_process = layout.is_first_stage, layout.is_last_stage
        self.share_embeddings_and_output_weights = config.model.share_embeddings_and_output_weights
        self.model_type = ModelType.encoder_or_decoder
        sequence_length = config.data.sequence_length
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                mcore, padded_vocab_size, sequence_length, position_embedding_type="rope", tp_group=self.tp_group
            )
            # With overlap Megatron-Core waits for a gradient of every parameter.
            if not (self.one_backward or config.parallel.overlap_grad_reduce):
                self.embedding.word_embeddings = BufferedEmbedding.like(self.embedding.word_embeddings, mcore)
            kind, linear = config.feedback.fusion, column_linear(config, config.precision.fp8_fusion)
            scale, context = resolved_input_scale(config), fusion_context(config, mcore)
            self.fusion = build_fusion(kind, mcore, scale, self.tp_group, linear, context)
        self.context = AttentionContext(config, mcore, self.cp_group)
        self.reuses_prefix = reuses_prefix(as_here(config))
        self.decoder = TransformerBlock(
            mcore,
            block_spec(mcore, config),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=self.pg_collection,
        )
        if self.post_process:
            self.output_layer = column_linear(config, config.precision.fp8_head)(
                mcore.hidden_size,
                padded_vocab_size,
                config=mcore,
                init_method=mcore.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
                tp_group=self.tp_group,
            )
        chunk_bytes = 2**20 * config.memory.loss_chunk_mib
        chunked = config.memory.chunks_loss(config.optimizer.sharding, config.precision.fp8_head)
        self.loss_shard = LossShard(vocab_size, layout, self.tp_group, chunk_bytes) if chunked else None
        self.setup_embeddings_and_output_layer()
        initialise_parameters(
            self.global_parameters(), config.model, vocab_size, config.run.seed, layout.tensor_rank, layout.tensor_size
        )

    @contextlib.contextmanager
    def training_step(self) -> Iterator[None]:
        """Within it, gradients need not pass through the parameters on their way to the gradient buffers."""
        embedding = self.embedding.word_embeddings if self.pre_process else None
        buffered = isinstance(embedding, BufferedEmbedding)
        if buffered:
            embedding.into_buffer = True
        try:
            yield
        finally:
            if buffered:
                embedding.into_buffer = False

    def global_parameters(self) -> Dict[str, torch.nn.Parameter]:
        """This stage's parameters by their names in the whole model."""
        first_layer = self.decoder.layers[0].layer_number - 1
        tied = self.share_embeddings_and_output_weights
        return {global_name(name, first_layer, tied): param for name, param in self.named_parameters()}

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """e: [b, s] token ids -> [s, b, h] ([s/tp, b, h] under sequence parallelism)."""
        return self.embedding(input_ids=tokens, position_ids=None)

    def first_inputs(
        self,
        tokens: torch.Tensor,
        states: Optional[torch.Tensor],
        fused: Optional[torch.Tensor],
        aligned: bool = False,
        start: int = 0,
    ) -> torch.Tensor:
        """The stack's inputs u on the first stage.

        Args:
            tokens: [b, s].
            states: h of the previous pass, jittered, not shifted, [s/tp, b, h]; None in the plain pass.
            fused: [s/tp, b] bool, positions that are fused; the others stay plain.
            aligned: states are those of the positions before already, as decoding has them.
            start: position in the row of the first token; the states are those of the whole row.

        Returns:
            [s/tp, b, h].
        """
        embedded = self.embed(tokens)
        if states is None and self.input_norm == "none":
            return embedded
        normed = rms_normalize(embedded, self.config.layernorm_epsilon)
        plain = normed if self.input_norm == "rms" else embedded
        if states is None:
            return plain
        if start:
            inputs = self.fusion.suffix(normed, states, start)
        else:
            inputs = (self.fusion.step if aligned else self.fusion)(normed, states)
        return torch.where(fused[..., None], inputs, plain)

    def token_products(self, tokens: torch.Tensor) -> torch.Tensor:
        """W_token N(e), [b, s] -> [s, b, h/tp], on the first stage: what gates depend on."""
        normed = rms_normalize(self.embed(tokens), self.config.layernorm_epsilon)
        return getattr(self.fusion, self.fusion.token_matrix)(normed)[0]

    def run_layers(
        self,
        hidden: torch.Tensor,
        document_starts: torch.Tensor,
        recompute: str = "none",
        start: int = 0,
        joined: Optional[KeyValueJoin] = None,
        host_starts: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Run this stage's layers and, on the last stage, the final norm.

        Args:
            hidden: [(s - start)/tp, b, h].
            document_starts: [b, s] bool, of the whole row.
            recompute: memory.recompute, for this call.
            start: position of the first of hidden.
            joined: see AttentionMasks.
            host_starts: see AttentionContext.of.
        """
        set_recompute(self.decoder, recompute)
        if not self.pre_process:
            self.decoder.set_input_tensor(hidden)
        context = self.context.of(document_starts, hidden.dtype, start, joined, host_starts)
        states = self.decoder(hidden_states=hidden, **context)
        self.decoder.set_input_tensor(None)  # it would hold the last pass's input, and its gradient, until the next one
        return states

    def losses(self, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of each label given top states.

        Args:
            states: [s/tp, b, h].
            labels: [b, s].

        Returns:
            float32 [s, b].
        """
        layout = self.layout
        return token_losses(self.logits(states), labels, self.vocab_size, layout.tensor_rank, layout.tensor_size)

    def losses_and_normalizers(self, states: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """As losses, and log sum exp of the logits over the real vocabulary, which a z-loss needs; both [s, b]."""
        place = (self.vocab_size, self.layout.tensor_rank, self.layout.tensor_size)
        return token_losses_and_normalizers(self.logits(states), labels, *place)

    def objective(
        self, states: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, squares: Optional[torch.Tensor]
    ) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        """Sum over the tokens of weights * loss + squares * (log sum exp of the logits)^2.

        Args:
            states: [s/tp, b, h].
            labels: [b, s].
            weights: of the losses, [s, b].
            squares: of the z-loss, [s, b]; None = there is none.

        Returns:
            The sum, whose gradient in the backward is 1 (see chunked_loss); losses [s, b]; log sum exp [s, b], at least
            where there is a z-loss.
        """
        if self._chunks_loss:
            return chunked_loss(states, self.head_weight(), labels, weights, squares, self.loss_shard)
        if squares is None:
            losses = self.losses(states, labels)
            return (losses * weights).sum(), losses, None
        losses, normalizers = self.losses_and_normalizers(states, labels)
        return (losses * weights).sum() + (normalizers.square() * squares).sum(), losses, normalizers

    @property
    def _chunks_loss(self) -> bool:
        """Whether the last stage's loss is chunked: not with Megatron-Core's loss scale, which it does not know."""
        return self.loss_shard is not None and self.config.grad_scale_func is None

    def weights_of_forward(self) -> List[torch.nn.Parameter]:
        """Weights whose gradients all come in the forward: the output head's, with a chunked loss."""
        embeds = self.pre_process and self.share_embeddings_and_output_weights
        return [self.head_weight()] if self.post_process and self._chunks_loss and not embeds else []

    def head_weight(self) -> torch.Tensor:
        """[v/tp, h], this rank's rows of the output head, on the last stage."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[s/tp, b, h] -> [s, b, v/tp], this rank's part of the padded vocabulary."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(states, weight=weight)[0]

    def set_input_tensor(self, tensor) -> None:
        """Inputs are passed to run_layers; Megatron-Core's schedules call this on every module."""
