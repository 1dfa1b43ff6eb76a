"""What test_native.py runs in each process: decoding and scoring with the Megatron model, from checkpoints."""

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from megatron_fbt.config.pretrain import PretrainConfig
from tests.unit.hf.checkpoints import write_checkpoint
from tests.unit.hf.reference import random_weights, tiny_config

VOCAB, PADDED, EOS, NEW = 50, 64, 49, 4
REGIMES = ("standard", "soft", "fused", "recurrent")
FUSED_PASSES = 2
GATED = {"attention_output_gate": True, "num_query_groups": 2, "qk_layernorm": True}
WINDOWED = {"sliding_window": 4, "window_attn_skip_freq": 2}
VARIANTS: Dict[str, Dict[str, Any]] = {
    "gate": {"num_query_groups": 2},
    "window": WINDOWED,
    "concat": {"fusion": "concat", "share_embeddings_and_output_weights": False, "add_qkv_bias": True},
    "all": {"fusion": "add", **GATED, **WINDOWED, "residual_multiplier": 1.4, "input_norm": "none"},
}
ROW = torch.randint(0, VOCAB, (14,), generator=torch.Generator().manual_seed(3))
PROMPT = 9
"""Tokens of ROW that are a prompt; the others follow one by one."""
LENGTHS = (1, 3, 9)
SEEDS, TEMPERATURE, SAMPLED = (5, 6, 7, 8), 5.0, 12
"""Of the first prompts' sampled texts, and their tokens."""


def config_of(variant: str) -> PretrainConfig:
    """The configuration of a variant; layers and heads can be halved, the vocabulary is padded."""
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
            padding = torch.full((PADDED - VOCAB, weights[name].size(1)), 10.0)
            weights[name] = torch.cat([weights[name], padding])
        write_checkpoint(folder / variant, weights, config_of(variant))


def prompts(count: int = 50) -> List[List[int]]:
    """Of 1 to 9 tokens."""
    generator = torch.Generator().manual_seed(11)
    lengths = [*LENGTHS, *torch.randint(1, 9, (count - len(LENGTHS),), generator=generator).tolist()]
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def pairs() -> list:
    """(context, continuation) of several lengths."""
    rows = prompts(8)
    return [(rows[i], rows[i + 1]) for i in range(7)]


def texts(model, batch_size: int) -> Dict[str, List[List[int]]]:
    """{regime: greedy continuation of each prompt}."""
    from megatron_fbt.inference.native.decoding import generate
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


def forced_logits(model, regime: str, rows: List[List[int]], prompt: int):
    """Logits [s, b, v] of rows, their first `prompt` columns as the prompt, the rest one by one; None behind."""
    from megatron_fbt.inference.native.decoding import Decoder

    decoder = Decoder(model, [row[: prompt - max(map(len, rows))] or row for row in rows], regime, FUSED_PASSES, 16)
    states = [decoder.prompt()]
    for t in range(prompt, max(map(len, rows))):
        tokens = torch.tensor([[row[t]] for row in rows])
        states.append(decoder.step(tokens))
    return model.logits(torch.cat(states)) if model.layout.is_last_stage else None


def scores(model, **options) -> List[tuple]:
    """(log-likelihoods, greedy) of every pair."""
    from megatron_fbt.inference.native.scoring import score

    found = score(model, pairs(), fused_passes=FUSED_PASSES, batch_size=3, **options)
    return [(one.log_likelihoods, one.greedy) for one in found]


def sampled(model, order: List[int], seeds: List[int], **options) -> List[List[int]]:
    """Sampled texts of the first prompts, computed in some order and returned in their own."""
    from megatron_fbt.inference.native.decoding import generate
    from megatron_fbt.inference.text import GenerationOptions

    rows, settings = prompts(), GenerationOptions("soft", max_new_tokens=SAMPLED, **options)
    found = generate(model, [rows[i] for i in order], settings, eos=EOS, seeds=[seeds[i] for i in order])
    return [found[order.index(i)].token_ids for i in range(len(order))]


def measure(rank: int, world_size: int, folder: str, tensor: int, pipeline: int, variants: List[str]) -> Dict[str, Any]:
    """Everything that one layout is asked for, by variant."""
    from megatron_fbt.inference.native.model import load

    found: Dict[str, Any] = {}
    for variant in variants:
        with load(Path(folder) / variant, tensor, pipeline) as model:
            own = found[variant] = {"texts": {8: texts(model, 8)}}
            if variant == variants[0]:
                own["texts"][1] = texts(model, 1)
            own["logits"] = {regime: forced_logits(model, regime, [ROW.tolist()], PROMPT) for regime in REGIMES}
            own["scores"] = {regime: scores(model, regime=regime) for regime in REGIMES}
            own["by passes"] = {regime: scores(model, regime=regime, passes=30) for regime in REGIMES}
            own["three passes"] = scores(model, regime="fused", passes=3)
            own["sampled"] = sampled(model, [0, 1, 2, 3], list(SEEDS), temperature=TEMPERATURE)
    return found


def measure_alone(rank: int, world_size: int, folder: str) -> Dict[str, Any]:
    """What one process shows for all: sampling, padding, callbacks, refusals."""
    from megatron_fbt.errors import ConfigError
    from megatron_fbt.inference.native.decoding import generate
    from megatron_fbt.inference.native.model import load
    from megatron_fbt.inference.native.scoring import score
    from megatron_fbt.inference.text import GenerationOptions

    found: Dict[str, Any] = {"sampled": [], "steps": []}
    with load(Path(folder) / "gate") as model:
        for order, seeds in (([0, 1, 2], [5, 6, 7]), ([2, 0, 1], [5, 6, 7]), ([0, 1, 2], [7, 8, 9])):
            found["sampled"].append(sampled(model, order, seeds, temperature=5.0))
        found["one of one"] = sampled(model, [0, 1, 2], [1, 2, 3], temperature=5.0, top_k=1)
        found["cold"] = sampled(model, [0, 1, 2], [1, 2, 3], temperature=1e-8)
        found["greedy"] = sampled(model, [0, 1, 2], [1, 2, 3])
        rows = [prompts()[i] for i in range(3)]
        found["padded"] = {
            regime: (
                forced_logits(model, regime, rows, max(map(len, rows))),
                [forced_logits(model, regime, [row], len(row)) for row in rows],
            )
            for regime in REGIMES
        }
        options = GenerationOptions("fused", 3, max_new_tokens=8)
        found["one token"] = [
            generate(model, [[17]], GenerationOptions(regime, 3, max_new_tokens=8))[0].token_ids
            for regime in ("soft", "fused", "recurrent")
        ]
        stop = generate(model, rows, options)[1].token_ids[2]
        found["stopped"] = (stop, generate(model, rows, options, eos=stop, on_tokens=found["steps"].append))
        for wrong, action in {
            "empty": lambda: generate(model, [[1], []], options),
            "between 0 and 49": lambda: generate(model, [[VOCAB]], options),
            "no prompt": lambda: generate(model, [], options),
            "one for each prompt": lambda: generate(model, [[1]], options, seeds=[1, 2]),
            "max_new_tokens=0": lambda: generate(model, [[1]], GenerationOptions(max_new_tokens=0)),
            "passes=0": lambda: score(model, [([1], [2])], passes=0),
            "regime='hard'": lambda: score(model, [([1], [2])], "hard"),
            "batch_size=0": lambda: score(model, [([1], [2])], batch_size=0),
        }.items():
            with pytest.raises(ConfigError, match=wrong):
                action()
    for wrong, layout in {"2 processes|needs 2": (2, 1), "num_layers": (1, 3), "num_attention_heads": (3, 1)}.items():
        with pytest.raises(ConfigError, match=wrong):
            with load(Path(folder) / "gate", *layout):
                pass
    return found


def decode_what_training_saved(rank: int, world_size: int, folder: str) -> List[List[List[int]]]:
    """Four processes: a checkpoint of the trainer's from TP 2 x PP 2, decoded in that layout and on four stages."""
    from megatron.core import parallel_state

    from megatron_fbt.inference.native.model import load
    from tests.distributed.export_case import case, save, scatter_weights
    from tests.distributed.model_case import Grid, build, start

    grid = Grid(tensor=2, pipeline=2)
    built = build(case(Path(folder), tied=False), grid, start(grid))
    scatter_weights(built)
    save(built, Path(folder), 7)
    parallel_state.destroy_model_parallel()
    found = []
    for layout in ((2, 2), (1, 4)):
        with load(folder, *layout) as model:
            found.append(texts(model, 50)["fused"])
    return found
