"""Full-Bandwidth Transformer (FBT, arXiv:2608.08888): network, parallel passes, regimes.

An FBT is a decoder-only transformer whose stack reads, at position t, its own top state of position t-1:

    u_0 = plain(e_0)                                      e: token embedding
    u_t = fuse(e_t, h_{t-1})                              h: top state, after the final norm
    h_t = stack(u_t ; keys and values of u_0 .. u_{t-1})
    fuse(e, h) = N(f(e, h)) * s                           N: RMSNorm without a weight; f by config.fusion:
        gate: (W_U h) * sigmoid(W_G N(e))   concat: W_C [N(h); N(e)]   add: W_U h + W_T N(e)
    plain(e) = N(e), or e where config.input_norm is "none"

K parallel passes iterate this (a Jacobi iteration): pass 1 reads plain(e), pass k reads fuse(e_t, h_{t-1} of pass k-1).
After k passes the first k positions hold their recurrent values, so T passes equal the recurrence.

Regimes of generation; new tokens are fused in all of them but the first:
    standard   prompt: one plain pass          new tokens: plain
    soft       prompt: one plain pass
    fused      prompt: one plain pass, then `fused_passes` fused ones; keys and values are those of the last
    recurrent  prompt: token by token (serial; for evaluation)

Self-contained: this file is copied into every exported model folder, so it imports nothing but torch,
transformers and the files beside it.
Shapes: B rows, T positions of this call, S positions with the cached ones, D hidden, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_fbt import FBTConfig
from .generation_fbt import CACHE_NAME, FBTCache, FBTGenerationMixin, check_regime, real_tokens
from .layers_fbt import (
    FUSION_CLASSES,
    FBTGateFusion,
    FBTLayer,
    FBTRMSNorm,
    GateTable,
    attention_mask_4d,
    rotary_angles,
    unit_rms,
)


@dataclass
class FBTOutput(CausalLMOutputWithPast):
    """transformers' causal output (loss, logits, past_key_values), and two fields of this model.

    Attributes:
        pass_losses: [K], mean NLL of each pass; with labels only.
        state: [B, T, D], top states of the last pass.
    """

    pass_losses: Optional[torch.Tensor] = None
    state: Optional[torch.Tensor] = None


class FBTPreTrainedModel(PreTrainedModel):
    config_class = FBTConfig
    base_model_prefix = "model"
    _no_split_modules = ["FBTLayer"]
    _supports_sdpa = True
    _supports_flash_attn = _supports_flash_attn_2 = True
    supports_gradient_checkpointing = True
    _supports_cache_class = True  # read by transformers before 4.53

    def _init_weights(self, module):
        if isinstance(module, FBTRMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            role = getattr(module, "role", None)
            if role == "fusion":
                bound = math.sqrt(3 / module.fan_in)
                nn.init.uniform_(module.weight, -bound, bound)
            else:
                scaled = self.config.scaled_init and role == "residual_output"
                depth = 2 * self.config.num_hidden_layers if scaled else 1
                nn.init.normal_(module.weight, std=self.config.initializer_range / math.sqrt(depth))
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


class FBTModel(FBTPreTrainedModel):
    """Embedding, fusion and stack: token ids to top states."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fusion = FUSION_CLASSES[config.fusion](config)
        self.layers = nn.ModuleList(FBTLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = FBTRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_table = None
        self.post_init()

    def build_gate_table(self):
        """Compute the gates sigmoid(W_G N(e)) of all tokens, [V, D]: calls without gradients look them up from now on.

        The table goes as soon as the model trains or its weights change; it is no part of what is saved.

        Raises:
            ValueError: The fusion has no gate of a token, the model trains, or its weights are not in memory.
        """
        if type(self.fusion) is not FBTGateFusion:
            raise ValueError(
                f"gate_table: config.fusion is {self.config.fusion!r}, only 'gate' has gates; leave it out"
            )
        if self.training:
            raise ValueError("gate_table: the model is in training mode, its gates change; call model.eval() first")
        if type(self.fusion.token_gate) is not torch.nn.Linear:
            kind = type(self.fusion.token_gate).__name__
            raise ValueError(f"gate_table: token_gate is a {kind}, not a plain matrix; merge its adapter first")
        if any(weight.is_meta for weight in (self.embed_tokens.weight, self.fusion.token_gate.weight)):
            raise ValueError("gate_table: the weights are not in memory (offloaded); leave it out")
        if self.gate_table is None or not self.gate_table.fits(self.embed_tokens, self.fusion, thoroughly=True):
            self.gate_table = None
            self.gate_table = GateTable(self.embed_tokens, self.fusion)

    def gates(self, input_ids):
        """Gates of tokens [B, T] from the table, [B, T, D]; None where they must be computed."""
        if self.gate_table is None or torch.is_grad_enabled():
            return None
        plain_matrix = type(self.fusion.token_gate) is torch.nn.Linear
        if not plain_matrix or not self.gate_table.fits(self.embed_tokens, self.fusion):
            self.gate_table = None
            return None
        return F.embedding(input_ids, self.gate_table.values)

    def train(self, mode=True):
        """As in PyTorch; in training mode there is no gate table."""
        if mode:
            self.gate_table = None
        return super().train(mode)

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def embed(self, input_ids):
        """Token ids [B, T] -> plain stack input and the token's part in the fusion, [B, T, D] each."""
        embedding = F.dropout(self.embed_tokens(input_ids), self.config.hidden_dropout, self.training)
        plain = unit_rms(embedding, self.config.rms_norm_eps) if self.config.input_norm == "rms" else embedding
        gates = self.gates(input_ids)
        return plain, self.fusion.token(embedding) if gates is None else gates

    def positions(self, input_ids, keep, past, starts=None):
        """Position of every token, [B or 1, T]; padding before a row's first token has position 0.

        Counted from the row's first token, or from the last of `starts` [B, T] (bool), if any.
        """
        if keep is None:
            positions = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)[None]
        else:
            positions = (keep.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        return positions if starts is None else positions - (positions * starts).cummax(-1).values

    def masks(self, keep, past, length, device, documents):
        """Attention mask by window: of attention_mask_4d, or `keep` itself for kernels that have causality built in."""
        windows = {layer.window for layer in self.layers}
        name = self.config._attn_implementation
        if name in (None, "eager", "sdpa"):
            return {w: attention_mask_4d(keep, past, length, device, w, documents) for w in windows}
        if documents is not None:
            raise ValueError(f"document_starts: attn_implementation={name!r} cannot keep documents apart; use 'sdpa'")
        return dict.fromkeys(windows, keep)

    def stack(self, inputs, positions, keep=None, cache=None, documents=None):
        """Stack inputs [B, T, D] -> top states [B, T, D]; with a cache, after and into it."""
        past, length = 0 if cache is None else cache.get_seq_length(), inputs.shape[1]
        masks = self.masks(keep, past, length, inputs.device, documents)
        rotary = rotary_angles(positions, self.config.head_dim, self.config.rope_theta, inputs.dtype)
        hidden = inputs
        for layer in self.layers:
            hidden = layer(hidden, rotary, masks, cache)
        state = self.norm(hidden)
        if cache is not None:
            cache.state = state[:, -1].clone()
        return state

    def parallel_passes(self, input_ids, passes, keep=None, document_starts=None, cache=None):
        """Top states [B, T, D] of each of K passes over whole rows, a list; the last pass fills the cache, if any."""
        plain, token = self.embed(input_ids)
        starts = None if document_starts is None else document_starts.bool()
        restarts = starts if self.config.reset_position_ids else None
        documents = starts.long().cumsum(-1) if self.config.reset_attention_mask and starts is not None else None
        positions = self.positions(input_ids, keep, 0, restarts)
        stays_plain = positions == 0 if starts is None else (positions == 0) | starts
        states, inputs = [], plain
        for k in range(passes):
            if k > 0:
                carried = F.pad(states[-1][:, :-1], (0, 0, 1, 0))
                inputs = torch.where(stays_plain[..., None], plain, self.fusion(token, carried))
            states.append(self.stack(inputs, positions, keep, cache if k == passes - 1 else None, documents))
        return states

    def token_by_token(self, input_ids, keep, cache):
        """The recurrence itself, going on from the cache: top states [B, T, D]."""
        past = cache.get_seq_length()
        if past and cache.state is None:
            raise ValueError("the cache was cropped, so its carried state is gone: start again with the whole prompt")
        plain, token = self.embed(input_ids)
        positions = self.positions(input_ids, keep, past)
        states = []
        for t in range(input_ids.shape[1]):
            now = slice(t, t + 1)
            inputs = plain[:, now]
            if cache.state is not None:
                fused = self.fusion(token[:, now], cache.state[:, None])
                begins = None if keep is None else (positions[:, now] == 0)[..., None]  # after padding
                inputs = fused if begins is None else torch.where(begins, inputs, fused)
            seen = None if keep is None else keep[:, : past + t + 1]
            states.append(self.stack(inputs, positions[:, now], seen, cache))
        return torch.cat(states, dim=1)

    def run_regime(self, input_ids, regime, fused_passes, keep, cache, prompt_length):
        """Prompt and new tokens as the regime says, after and into the cache: top states [B, T, D]."""
        past, length = cache.get_seq_length(), input_ids.shape[1]
        prompt = max(0, min(prompt_length, past + length) - past) if past == 0 else 0
        states = []
        if prompt:
            head, head_keep = input_ids[:, :prompt], None if keep is None else keep[:, :prompt]
            if regime == "recurrent":
                states.append(self.token_by_token(head, head_keep, cache))
            else:
                passes = 1 + fused_passes if regime == "fused" else 1
                states.append(self.parallel_passes(head, passes, head_keep, cache=cache)[-1])
        if prompt < length:
            tail = input_ids[:, prompt:]
            if regime == "standard":
                positions = self.positions(tail, keep, past + prompt)
                states.append(self.stack(self.embed(tail)[0], positions, keep, cache))
            else:
                states.append(self.token_by_token(tail, keep, cache))
        return torch.cat(states, dim=1)

    def forward(self, input_ids, attention_mask=None, passes=None):
        """Top states [B, T, D] of the last of `passes` parallel passes (default: config.passes)."""
        keep = real_tokens(attention_mask, None, 0)
        return self.parallel_passes(input_ids, passes or self.config.passes, keep)[-1]


class FBTForCausalLM(FBTPreTrainedModel, FBTGenerationMixin):
    """Language model: logits, loss over passes, generation in four regimes."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = FBTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, new_embeddings):
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids,
        attention_mask=None,
        labels=None,
        passes=None,
        regime=None,
        fused_passes=1,
        prompt_length=None,
        document_starts=None,
        past_key_values=None,
        cache=None,
        use_cache=None,
        logits_to_keep=0,
        return_dict=None,
        **kwargs,
    ):
        """One call: K parallel passes, or the prompt or the next tokens of a regime.

        Args:
            input_ids: [B, T], without the cached tokens.
            attention_mask: [B, S], 1 = token, 0 = padding; with a cache, padding must be on the left.
            labels: [B, T], -100 = no loss; position t is scored against labels[:, t + 1].
            passes: Number K of parallel passes; None = config.passes, or the regime's.
            regime: One of "standard", "soft", "fused", "recurrent"; None = parallel passes, or as the cache goes on.
            fused_passes: Fused passes over the prompt in the fused regime.
            prompt_length: Where new tokens start, in a regime's call without a cache; None = all are prompt.
            document_starts: [B, T], True = first token of a document: plain in every pass, as is each row's first.
                Attention and positions follow documents as the configuration says. Parallel passes only.
            past_key_values: FBTCache to go on from; newer versions of transformers call it `cache`.
            use_cache: Return a cache; None = config.use_cache outside of training.
            logits_to_keep: Logits of this many last positions only; 0 = all.

        Raises:
            ValueError: Arguments that exclude each other or have impossible values.
        """
        items = kwargs.pop("num_items_in_batch", None)
        if unknown := sorted(name for name, value in kwargs.items() if value):
            raise TypeError(f"FBTForCausalLM.forward does not know {', '.join(unknown)}")
        cache, past = past_key_values if cache is None else cache, 0
        if cache is not None:
            if not isinstance(cache, FBTCache):
                raise ValueError(f"the cache is a {type(cache).__name__}: must be an FBTCache, or left out")
            past = cache.get_seq_length()
        if regime is None and passes is None and past:
            regime = cache.regime
        apart = document_starts is not None and self.config.documents_apart
        if apart and (use_cache or cache is not None):
            raise ValueError("document_starts: documents are apart in this model, so no cache can go on: leave it out")
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None and not self.training and not apart
            use_cache = use_cache or cache is not None
        if cache is None and (use_cache or regime is not None):
            cache = FBTCache()
        if cache is not None and self.is_gradient_checkpointing and self.training and torch.is_grad_enabled():
            raise ValueError("use_cache: gradient checkpointing computes layers twice; leave out cache and regime")
        keep = real_tokens(attention_mask, cache, past)
        if regime is None:
            passes = self.config.passes if passes is None else passes
            if passes < 1 or past:
                raise ValueError(f"passes={passes}: must be at least 1, on whole rows (not on tokens after a cache)")
            states = self.model.parallel_passes(input_ids, passes, keep, document_starts, cache)
            regime = "standard" if passes == 1 else "fused"
        else:
            check_regime(regime, fused_passes)
            if passes is not None or document_starts is not None:
                raise ValueError(f"regime={regime!r} sets the passes itself: leave out passes and document_starts")
            prompt_length = input_ids.shape[1] if prompt_length is None else prompt_length
            states = [self.model.run_regime(input_ids, regime, fused_passes, keep, cache, prompt_length)]
        if cache is not None:
            cache.regime = regime
        loss, pass_losses = (None, None) if labels is None else self.loss_over_passes(states, labels, items)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output = FBTOutput(
            loss=loss,
            logits=self.lm_head(states[-1][:, kept]),
            **{CACHE_NAME: cache if use_cache else None},
            pass_losses=pass_losses,
            state=states[-1],
        )
        return output.to_tuple() if return_dict is False else output

    def loss_over_passes(self, states, labels, num_items=None):
        """NLL(pass 1) + mean over k = 2..K of NLL(pass k), and the K terms; sums over tokens, divided once."""
        targets = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        count = (targets != -100).sum().clamp(min=1) if num_items is None else num_items
        sums = [F.cross_entropy(self.lm_head(h).float().flatten(0, 1), targets, reduction="sum") for h in states]
        losses = torch.stack(sums) / count
        return (losses[0] + losses[1:].mean() if len(states) > 1 else losses[0]), losses
