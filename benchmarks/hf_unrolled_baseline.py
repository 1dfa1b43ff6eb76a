"""What one would write by hand: a Hugging Face Llama called K times with inputs_embeds, in one process, in fp32.

The yardstick for the trainer's multi-pass step. The recipe is the trainer's: gated fusion, RMS-normalised inputs,
jitter on the carried state, a random plain prefix in each extra pass, tied embeddings, loss NLL(1) + mean of
NLL(2..K), gradient accumulation, clipping, AdamW.

    python benchmarks/hf_unrolled_baseline.py --passes 2 --steps 5
"""

import argparse
import json
import math
import resource
import statistics
import time
from dataclasses import dataclass
from typing import Callable, List

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaModel


@dataclass(frozen=True)
class Shape:
    """Size of the model and of one micro-batch."""

    hidden_size: int = 512
    num_layers: int = 8
    num_attention_heads: int = 8
    num_query_groups: int = 8
    ffn_hidden_size: int = 1408
    sequence_length: int = 1024
    vocab_size: int = 8192
    micro_batch_size: int = 1


class UnrolledLlama(nn.Module):
    """LlamaModel with a fusion gate and a tied head."""

    def __init__(self, shape: Shape, jitter: float = 0.02) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_query_groups,
            intermediate_size=shape.ffn_hidden_size,
            vocab_size=shape.vocab_size,
            max_position_embeddings=shape.sequence_length,
            rms_norm_eps=1e-5,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.llama = LlamaModel(config)
        self.state_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.token_gate = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        for layer in (self.state_proj, self.token_gate):
            bound = math.sqrt(3 / shape.hidden_size)
            nn.init.uniform_(layer.weight, -bound, bound)
        self.jitter = jitter

    def fuse(self, plain: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Inputs of an extra pass; plain and state are [b, s, d]."""
        state = state + torch.empty_like(state).uniform_(-self.jitter, self.jitter)
        carried = F.pad(state[:, :-1], (0, 0, 1, 0))
        gated = self.state_proj(carried) * torch.sigmoid(self.token_gate(plain))
        fused = F.rms_norm(gated, gated.shape[-1:], eps=1e-5)
        batch, length = plain.shape[:2]
        plain_length = 1 + (torch.rand(batch, 1) * length).floor()
        is_plain = torch.arange(length) < plain_length
        return torch.where(is_plain[..., None], plain, fused)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, passes: int) -> torch.Tensor:
        """Loss of `passes` passes over tokens [b, s]; labels [b, s] are the next tokens."""
        embedded = self.llama.embed_tokens(tokens)
        plain = F.rms_norm(embedded, embedded.shape[-1:], eps=1e-5)
        losses: List[torch.Tensor] = []
        state = None
        for _ in range(passes):
            inputs = plain if state is None else self.fuse(plain, state)
            state = self.llama(inputs_embeds=inputs).last_hidden_state
            logits = F.linear(state, self.llama.embed_tokens.weight)
            losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        if passes == 1:
            return losses[0]
        return losses[0] + torch.stack(losses[1:]).mean()


def build_step(shape: Shape, passes: int, micro_batches: int, seed: int = 0) -> Callable[[], float]:
    """Build model, optimizer and random data.

    Args:
        shape: sizes.
        passes: K.
        micro_batches: micro-batches that are accumulated in one optimizer step.
        seed: of weights and data.

    Returns:
        A function that does one optimizer step on the same data and returns its loss.
    """
    torch.manual_seed(seed)
    model = UnrolledLlama(shape)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))
    rows = torch.randint(shape.vocab_size, (micro_batches, shape.micro_batch_size, shape.sequence_length + 1))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for row in rows:
            loss = model(row[:, :-1], row[:, 1:], passes) / micro_batches
            loss.backward()
            total += loss.item()
        used = [p for p in model.parameters() if p.grad is not None]
        nn.utils.clip_grad_norm_(used, 1.0)
        optimizer.step()
        return total

    return step


def main() -> None:
    """Time some steps and print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--passes", type=int, default=2, help="pass count K")
    parser.add_argument("--micro_batches", type=int, default=1, help="micro-batches in one step")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed, after one that is not")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    step = build_step(Shape(), args.passes, args.micro_batches)
    losses = [step()]
    seconds = []
    for _ in range(args.steps):
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report = {"passes": args.passes, "step_s": statistics.median(seconds), "peak_rss_mib": peak, "losses": losses}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
