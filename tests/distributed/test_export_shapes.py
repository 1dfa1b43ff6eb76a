"""Head counts that converters get wrong, on two tensor-parallel ranks: native and exported logits at every position."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fbt.core.stage import FBTStage
from megatron_fbt.hf.convert import convert_checkpoint
from tests.distributed.export_case import SHAPE, save, scatter_weights
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Case, Grid, build, start
from tests.unit.hf.exports import LetterTokenizer, load

VOCAB, S = 50, 128
HEADS = {"all": (4, 4), "half": (4, 2), "a third": (6, 2)}
"""Query heads and key/value heads. Fewer of the latter than ranks cannot be split and are refused."""


def tokens() -> torch.Tensor:
    """[b, s]."""
    return torch.randint(0, VOCAB, (2, S), generator=torch.Generator().manual_seed(3))


def save_and_measure(rank: int, world_size: int, folder: str) -> dict:
    """Save each shape's model; {name: native logits [b, s, v] of two passes}."""
    grid = Grid(tensor=2)
    layout, found = start(grid), {}
    tokenizer = {"data.tokenizer.type": "huggingface", "data.tokenizer.path": f"{folder}/tokenizer"}
    for name, (heads, groups) in HEADS.items():
        shape = {"model.num_attention_heads": heads, "model.num_query_groups": groups, "model.vocab_size": VOCAB}
        built = build(Case("", {**SHAPE, **tokenizer, **shape, "data.sequence_length": S}), grid, layout)
        scatter_weights(built)
        save(built, Path(folder) / name, 1)
        found[name] = logits(built.stage.eval(), world_size)
    return found


@torch.no_grad()
def logits(stage: FBTStage, ranks: int) -> torch.Tensor:
    """Of two passes, [b, s, v]."""
    starts = torch.zeros(2, S, dtype=torch.bool)
    starts[:, 0] = True
    states = stage.run_layers(stage.first_inputs(tokens(), None, None), starts)
    states = stage.run_layers(stage.first_inputs(tokens(), states, ~starts.t()), starts)
    part = stage.logits(states).transpose(0, 1).contiguous()
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part, group=stage.tp_group)
    return torch.cat(parts, dim=-1)[..., :VOCAB]


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    LetterTokenizer(VOCAB).save_for_huggingface(folder / "tokenizer")
    return folder, run_distributed(save_and_measure, 2, str(folder), timeout=120)[0]


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_logits_agree_beyond_position_100(native, tmp_path, name):
    folder, expected = native
    convert_checkpoint(f"{folder}/{name}", tmp_path / "model")
    found = load(tmp_path / "model")(tokens(), passes=2).logits
    assert found.shape == expected[name].shape and expected[name].std() > 0.3
    assert (found - expected[name]).abs().max() <= 1e-5 * max(1.0, expected[name].abs().max().item())
