"""An independent Full-Bandwidth Transformer: plain formulas in double precision on canonical weights, head by head."""

from typing import Callable, Dict, List, Sequence

import torch
from torch import Tensor

from megatron_fbt.config.feedback import resolved_input_scale
from megatron_fbt.config.pretrain import PretrainConfig

FUSION_NAMES = {
    "gate": ("state_proj", "token_gate"),
    "concat": ("concat_state_proj", "concat_token_proj"),
    "add": ("state_proj", "token_proj"),
}


def tiny_config(fusion: str = "gate", **model_fields) -> PretrainConfig:
    """A small configuration; fields of its model section may be set."""
    config = PretrainConfig()
    fields = {"num_layers": 2, "hidden_size": 48, "ffn_hidden_size": 40, "num_attention_heads": 4, "kv_channels": 12}
    for name, value in {**fields, **model_fields}.items():
        assert hasattr(config.model, name)
        setattr(config.model, name, value)
    config.feedback.fusion = fusion
    config.precision.dtype = "fp32"
    config.data.sequence_length = 64
    return config


def random_weights(config: PretrainConfig, vocab_size: int = 50, seed: int = 0) -> Dict[str, Tensor]:
    """Every canonical weight, fp32, far from its initial value."""
    model = config.model
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.08

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    width, head = model.hidden_size, model.head_size
    state, token = FUSION_NAMES[config.feedback.fusion]
    query_like = 2 if model.attention_output_gate else 1
    rows = (query_like * model.num_attention_heads + 2 * model.query_groups) * head
    weights = {
        "embedding.word_embeddings.weight": matrix(vocab_size, width) * 3,
        f"fusion.{state}.weight": matrix(width, width),
        f"fusion.{token}.weight": matrix(width, width) * 3,
        "decoder.final_layernorm.weight": norm(width),
    }
    for index in range(model.num_layers):
        prefix = f"decoder.layers.{index}."
        weights[prefix + "input_layernorm.weight"] = norm(width)
        weights[prefix + "self_attention.linear_qkv.weight"] = matrix(rows, width)
        weights[prefix + "self_attention.linear_proj.weight"] = matrix(width, model.num_attention_heads * head)
        weights[prefix + "pre_mlp_layernorm.weight"] = norm(width)
        weights[prefix + "mlp.linear_fc1.weight"] = matrix(2 * model.ffn_size, width)
        weights[prefix + "mlp.linear_fc2.weight"] = matrix(width, model.ffn_size)
        if model.add_qkv_bias:
            weights[prefix + "self_attention.linear_qkv.bias"] = matrix(rows) * 10
        if model.qk_layernorm:
            weights[prefix + "self_attention.q_layernorm.weight"] = norm(head)
            weights[prefix + "self_attention.k_layernorm.weight"] = norm(head)
    if not model.share_embeddings_and_output_weights:
        weights["output_layer.weight"] = matrix(vocab_size, width)
    return weights


class Reference:
    """States and logits of one row of token ids.

    Args:
        weights: canonical weights.
        config: what they belong to.
        document_starts: where documents begin in the row, for data.reset_attention_mask and reset_position_ids.
    """

    def __init__(self, weights: Dict[str, Tensor], config: PretrainConfig, document_starts: Sequence[int] = ()) -> None:
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.model, self.data, self.fusion = config.model, config.data, config.feedback.fusion
        self.document_starts = document_starts
        self.scale = resolved_input_scale(config)

    def norm(self, x: Tensor, weight: Tensor = None) -> Tensor:
        unit = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.model.layernorm_epsilon)
        return unit if weight is None else unit * weight

    def embedding(self, ids: Tensor) -> Tensor:
        return self.weights["embedding.word_embeddings.weight"][ids]

    def plain(self, ids: Tensor) -> Tensor:
        embedding = self.embedding(ids)
        return self.norm(embedding) if self.model.input_norm == "rms" else embedding

    def fuse(self, ids: Tensor, state: Tensor) -> Tensor:
        token = self.norm(self.embedding(ids))
        w_state, w_token = (self.weights[f"fusion.{name}.weight"] for name in FUSION_NAMES[self.fusion])
        if self.fusion == "concat":
            mixed = torch.cat([self.norm(state), token], dim=-1) @ torch.cat([w_state, w_token], dim=1).T
        elif self.fusion == "add":
            mixed = state @ w_state.T + token @ w_token.T
        else:
            mixed = (state @ w_state.T) * torch.sigmoid(token @ w_token.T)
        return self.norm(mixed) * self.scale

    def documents(self, length: int) -> Tensor:
        """First position of the document that each position of a row lies in."""
        firsts = torch.zeros(length, dtype=torch.long)
        for start in self.document_starts:
            firsts[start:] = start
        return firsts

    def blocked(self, layer_number: int, length: int) -> Tensor:
        """[query, key]: what a position may not attend to in a layer (counted from 1)."""
        query, key = torch.arange(length)[:, None], torch.arange(length)
        blocked = key > query
        window, skip = self.model.sliding_window, self.model.window_attn_skip_freq
        if window is not None and not (skip and layer_number % skip == 0):
            blocked = blocked | (key <= query - window)
        if self.data.reset_attention_mask:
            blocked = blocked | (key < self.documents(length)[:, None])
        return blocked

    def turn(self, x: Tensor) -> Tensor:
        """Rotary embedding of [T, hn] by complex multiplication: channel c pairs with c + hn / 2."""
        half = x.shape[1] // 2
        rate = self.model.rotary_base ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[1])
        firsts = self.documents(len(x)) if self.data.reset_position_ids else 0
        angle = (torch.arange(len(x)) - firsts).double()[:, None] * rate
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=1)

    def attention(self, x: Tensor, prefix: str, layer_number: int) -> Tensor:
        model, weights, hn = self.model, self.weights, self.model.head_size
        share = model.num_attention_heads // model.query_groups
        in_group = (2 * share if model.attention_output_gate else share) + 2
        projection = weights[prefix + "linear_qkv.weight"]
        bias = weights.get(prefix + "linear_qkv.bias", projection.new_zeros(len(projection)))
        rows = torch.cat([projection, bias[:, None]], dim=1).split(hn)  # one [hn, D + 1] block a head
        x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        blocked = self.blocked(layer_number, len(x))
        heads: List[Tensor] = []
        for group in range(model.query_groups):
            *query_rows, key_rows, value_rows = rows[group * in_group : (group + 1) * in_group]
            gate_rows = [query_rows.pop(share) for _ in range(share)] if model.attention_output_gate else []
            key, value = x @ key_rows.T, x @ value_rows.T
            if model.qk_layernorm:
                key = self.norm(key, weights[prefix + "k_layernorm.weight"])
            for index, query_row in enumerate(query_rows):
                query = x @ query_row.T
                if model.qk_layernorm:
                    query = self.norm(query, weights[prefix + "q_layernorm.weight"])
                scores = self.turn(query) @ self.turn(key).T / hn**0.5
                heads.append(scores.masked_fill(blocked, -torch.inf).softmax(-1) @ value)
                if model.attention_output_gate:
                    heads[-1] = heads[-1] * torch.sigmoid(x @ gate_rows[index].T)
        return torch.cat(heads, dim=1) @ weights[prefix + "linear_proj.weight"].T

    def stack(self, x: Tensor) -> Tensor:
        """Stack inputs [T, D] -> top states [T, D]."""
        factor = self.model.residual_multiplier
        for index in range(self.model.num_layers):
            prefix = f"decoder.layers.{index}."
            normed = self.norm(x, self.weights[prefix + "input_layernorm.weight"])
            x = x + factor * self.attention(normed, prefix + "self_attention.", index + 1)
            inner = self.norm(x, self.weights[prefix + "pre_mlp_layernorm.weight"])
            both = inner @ self.weights[prefix + "mlp.linear_fc1.weight"].T
            gate, up = both[:, : self.model.ffn_size], both[:, self.model.ffn_size :]
            x = x + factor * (gate * torch.sigmoid(gate) * up) @ self.weights[prefix + "mlp.linear_fc2.weight"].T
        return self.norm(x, self.weights["decoder.final_layernorm.weight"])

    def logits(self, states: Tensor) -> Tensor:
        head = self.weights.get("output_layer.weight", self.weights["embedding.word_embeddings.weight"])
        return states @ head.T

    def passes(self, ids: Tensor, count: int, plain: Callable[[int], bool] = lambda t: t == 0) -> List[Tensor]:
        """Top states of each parallel pass; plain(t) says whether position t stays plain."""
        return [self.stack(inputs) for inputs in self.pass_inputs(ids, count, plain)]

    def pass_inputs(self, ids: Tensor, count: int, plain: Callable[[int], bool] = lambda t: t == 0) -> List[Tensor]:
        inputs = [self.plain(ids)]
        for _ in range(count - 1):
            state = self.stack(inputs[-1])
            rows = [self.plain(ids[t]) if plain(t) else self.fuse(ids[t], state[t - 1]) for t in range(len(ids))]
            inputs.append(torch.stack(rows))
        return inputs

    def continued(self, inputs: Tensor, ids: Tensor) -> Tensor:
        """Stack inputs of the first positions given, every further token fused one by one: all top states."""
        for t in range(len(inputs), len(ids)):
            inputs = torch.cat([inputs, self.fuse(ids[t], self.stack(inputs)[-1])[None]])
        return self.stack(inputs)

    def regime(self, ids: Tensor, regime: str, prompt_length: int, fused_passes: int = 1) -> Tensor:
        """Top states of prompt and further tokens, by the definition of the regime."""
        prompt = ids[:prompt_length]
        if regime == "standard":
            return self.stack(self.plain(ids))
        if regime == "recurrent":
            return self.continued(self.plain(ids[:1]), ids)
        count = 1 + fused_passes if regime == "fused" else 1
        return self.continued(self.pass_inputs(prompt, count)[-1], ids)

    def greedy(self, prompt: Tensor, regime: str, new_tokens: int, fused_passes: int = 1) -> List[int]:
        """Greedy continuation in a regime."""
        ids = prompt
        for _ in range(new_tokens):
            states = self.regime(ids, regime, len(prompt), fused_passes)
            ids = torch.cat([ids, self.logits(states[-1:]).argmax(-1)])
        return ids[len(prompt) :].tolist()
