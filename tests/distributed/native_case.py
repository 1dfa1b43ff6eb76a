"""What test_native.py runs in each process: decoding and scoring with the Megatron model, from checkpoints."""

from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch

from tests.unit.hf.checkpoints import write_checkpoint
from tests.unit.hf.reference import random_weights, tiny_config

VOCAB, EOS, NEW = 50, 49, 6
REGIMES = ("standard", "soft", "fused", "recurrent")
FUSED_PASSES = 2
GATED = {"attention_output_gate": True, "num_query_groups": 2, "qk_layernorm": True}
WINDOWED = {"sliding_window": 4, "window_attn_skip_freq": 2}
VARIANTS: Dict[str, Dict[str, Any]] = {
    "gate": {"num_query_groups": 2},
    "window": {**WINDOWED, "num_layers": 4},
    "concat": {"fusion": "concat", "share_embeddings_and_output_weights": False},
    "all": {
        "fusion": "add",
        **GATED,
        **WINDOWED,
        "num_layers": 4,
        "residual_multiplier": 1.4,
        "input_norm": "none",
        "add_qkv_bias": True,
    },
}
SPLIT_VARIANTS = ("gate", "all")
"""Also computed by several processes."""


def config_of(variant: str):
    """The configuration of a variant; layers, heads and vocabulary can be halved, the vocabulary with padding."""
    config = tiny_config(**VARIANTS[variant], vocab_size=VOCAB, make_vocab_size_divisible_by=32)
    config.feedback.input_scale = 0.8
    return config


def weights_of(variant: str) -> Dict[str, torch.Tensor]:
    """Its weights, unpadded."""
    return random_weights(config_of(variant), VOCAB, seed=6)


def write_checkpoints(folder: Path) -> None:
    """A checkpoint of each variant, whose tables have padded rows that no token may come from."""
    for variant in VARIANTS:
        weights = weights_of(variant)
        for name in {"embedding.word_embeddings.weight", "output_layer.weight"}.intersection(weights):
            padding = torch.full((14, weights[name].size(1)), 10.0)
            weights[name] = torch.cat([weights[name], padding])
        write_checkpoint(folder / variant, weights, config_of(variant))


def prompts(count: int = 50) -> List[List[int]]:
    """Of 1 to 12 tokens."""
    generator = torch.Generator().manual_seed(11)
    lengths = [1, 3, 9, *torch.randint(1, 13, (count - 3,), generator=generator).tolist()]
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def texts(model, batch_size: int) -> Dict[str, List[List[int]]]:
    """{regime: greedy continuation of each prompt}."""
    from megatron_fbt.inference.native import generate
    from megatron_fbt.inference.text import GenerationOptions

    rows, found = prompts(), {}
    for regime in REGIMES:
        options = GenerationOptions(regime, FUSED_PASSES, max_new_tokens=NEW)
        found[regime] = [
            result.token_ids
            for begin in range(0, len(rows), batch_size)
            for result in generate(model, rows[begin : begin + batch_size], options, eos=EOS)
        ]
    return found


def texts_of_layout(
    rank: int, world_size: int, folder: str, tensor: int, pipeline: int
) -> Dict[Tuple[str, int], Dict[str, List[List[int]]]]:
    """{(variant, batch size): texts} in one layout."""
    from megatron_fbt.inference.native import load

    found = {}
    for variant in VARIANTS if world_size == 1 else SPLIT_VARIANTS:
        with load(Path(folder) / variant, tensor, pipeline) as model:
            for batch_size in (1, 8):
                found[variant, batch_size] = texts(model, batch_size)
    return found
