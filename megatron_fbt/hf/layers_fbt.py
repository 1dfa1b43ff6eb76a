"""Layers of a Full-Bandwidth Transformer: fusion, attention with its masks, MLP.

Self-contained: this file is copied into every exported model folder, so it imports nothing but torch,
transformers and the files beside it.
Shapes: B rows, T positions of this call, S positions with the cached ones, D hidden, H heads, G key/value heads,
C head size.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def unit_rms(x, eps):
    """N(x) = x / sqrt(mean(x^2) + eps), computed in fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotary_angles(positions, head_dim, theta, dtype):
    """Cosines and sines of the rotary embedding: [B, T] -> two [B, 1, T, C]."""
    channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None, :, None].float() / theta ** (channels / head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x, cos, sin):
    """Turn the channel pairs (c, c + C/2) of [B, heads, T, C]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attention_mask_4d(keep, past, length, device, window=None, documents=None):
    """Boolean mask [B or 1, 1, T, S], True = may attend; None where the causal mask of the whole call is enough.

    A padded position attends to itself, which keeps its (unused) output finite.

    Args:
        keep: [B, S], True = token, False = padding; None = no padding.
        past: Cached positions.
        length: Positions T of this call.
        window: Positions that a query sees, its own included; None = all earlier ones.
        documents: [B, T] number of each position's document; only without cached positions. None = one document.
    """
    if window is not None and past + length <= window:
        window = None
    if keep is None and window is None and documents is None and (past == 0 or length == 1):
        return None
    query = torch.arange(past, past + length, device=device)[:, None]
    key = torch.arange(past + length, device=device)[None, :]
    mask = (key <= query)[None, None]
    if window is not None:
        mask = mask & (key > query - window)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return mask if keep is None else (mask & keep[:, None, None, :]) | (key == query)


class FBTRMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return self.weight * unit_rms(x, self.eps)


class FBTFusion(nn.Module):
    """fuse(e, h) = N(W_U h + W_T N(e)) * s, the variant "add", and the parts that the others replace."""

    matrices = ("state_proj", "token_proj")  # W_U, W_T
    fan_in = 1  # inputs of one sum, in multiples of D: initial values have standard deviation 1 / sqrt(fan_in D)

    def __init__(self, config):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_scale = config.input_scale
        for name in self.matrices:
            matrix = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
            matrix.role, matrix.fan_in = "fusion", self.fan_in * config.hidden_size
            setattr(self, name, matrix)

    def token(self, embedding):
        """What the token contributes, computed once for all passes."""
        return getattr(self, self.matrices[1])(unit_rms(embedding, self.eps))

    def mix(self, token, state):
        return token + getattr(self, self.matrices[0])(state)

    def forward(self, token, state):
        return unit_rms(self.mix(token, state), self.eps) * self.input_scale


class FBTGateFusion(FBTFusion):
    """fuse(e, h) = N((W_U h) * sigmoid(W_G N(e))) * s: the state is on the value path, the token only gates."""

    matrices = ("state_proj", "token_gate")  # W_U, W_G

    def token(self, embedding):
        return torch.sigmoid(super().token(embedding))

    def mix(self, token, state):
        return self.state_proj(state) * token


class FBTConcatFusion(FBTFusion):
    """fuse(e, h) = N(W_C [N(h); N(e)]) * s, with the two halves of W_C [D, 2 D] in a matrix each."""

    matrices = ("concat_state_proj", "concat_token_proj")
    fan_in = 2

    def mix(self, token, state):
        return super().mix(token, unit_rms(state, self.eps))


FUSION_CLASSES = {"gate": FBTGateFusion, "concat": FBTConcatFusion, "add": FBTFusion}


class GateTable:
    """sigmoid(W_G N(e)) of every token of the vocabulary: [V, D], in the weights' number format.

    Args:
        embedding: The model's embedding.
        fusion: Its gate fusion.
        rows: Tokens that are computed at a time.
    """

    @torch.no_grad()
    def __init__(self, embedding, fusion, rows=8192):
        self.made_of = self.identity(embedding, fusion)
        self.checksums = self.sums(embedding, fusion)
        self.values = torch.cat([fusion.token(part) for part in embedding.weight.split(rows)])

    @staticmethod
    def identity(embedding, fusion):
        """Which tensors the two weights are now, and after how many changes that PyTorch counts."""
        weights = (embedding.weight, fusion.token_gate.weight)
        return [(w.data_ptr(), w.dtype, None if w.is_inference() else w._version) for w in weights]

    @staticmethod
    def sums(embedding, fusion):
        """Sums over the bits of the two weights: other changes (through .data) show here."""
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        weights = (embedding.weight.detach(), fusion.token_gate.weight.detach())
        return [w.view(integers[w.element_size()]).sum(dtype=torch.int64).item() for w in weights]

    def fits(self, embedding, fusion, thoroughly=False):
        """Whether the weights are still those that the table was made of."""
        if self.made_of != self.identity(embedding, fusion):
            return False
        return not thoroughly or self.checksums == self.sums(embedding, fusion)


def eager_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=1.0, **kwargs):
    """Attention in PyTorch's basic operations: "eager" of transformers' attention interface.

    Args:
        module: Has `num_key_value_groups`.
        query: [B, H, T, C].
        key: [B, G, S, C], as `value`.
        attention_mask: Of attention_mask_4d.
        dropout: On the probabilities.
        scaling: Of the scores.

    Returns:
        [B, T, H, C], and the probabilities [B, H, T, S].
    """
    key, value = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    wide = torch.promote_types(scores.dtype, torch.float32)
    probabilities = F.dropout(scores.softmax(dim=-1, dtype=wide).to(query.dtype), dropout)
    return (probabilities @ value).transpose(1, 2), probabilities


class FBTAttention(nn.Module):
    is_causal = True  # read by the attention functions of transformers, as the three names of __init__ are

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        self.window = config.window_of(layer_idx + 1)
        self.dropout = config.attention_dropout
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.g_proj = nn.Linear(config.hidden_size, query_size, bias=bias) if config.attention_output_gate else None
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.o_proj.role = "residual_output"
        norm = (lambda: FBTRMSNorm(config.head_dim, config.rms_norm_eps)) if config.qk_layernorm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x, rotary, mask, cache):
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), *rotary)  # [B, H, T, C]
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), *rotary)  # [B, G, T, C]
        v = self.v_proj(x).view(heads).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)  # [B, G, S, C]
        name = self.config._attn_implementation or "sdpa"
        attend = eager_attention if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        dropout = self.dropout if self.training else 0.0
        options = {"dropout": dropout, "scaling": self.head_dim**-0.5, "sliding_window": self.window}
        out = attend(self, q, k, v, mask, **options)[0].flatten(2)
        if self.g_proj is not None:
            out = (out * torch.sigmoid(self.g_proj(x).float())).to(out.dtype)
        return self.o_proj(out)


class FBTMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.down_proj.role = "residual_output"

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FBTLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.dropout = config.hidden_dropout
        self.multiplier = config.residual_multiplier
        self.window = config.window_of(layer_idx + 1)
        self.input_layernorm = FBTRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = FBTAttention(config, layer_idx)
        self.post_attention_layernorm = FBTRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FBTMLP(config)

    def forward(self, x, rotary, masks, cache):
        """[B, T, D] -> the same shape; `masks` by window, see FBTModel.masks."""
        x = self.add(x, self.self_attn(self.input_layernorm(x), rotary, masks[self.window], cache))
        return self.add(x, self.mlp(self.post_attention_layernorm(x)))

    def add(self, x, branch):
        branch = branch if self.multiplier == 1 else branch * self.multiplier
        return x + F.dropout(branch, self.dropout, self.training)
