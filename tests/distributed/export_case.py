"""What test_export_parity.py compares: native logits of several passes, and checkpoints saved from two layouts."""

from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.core.schedule import PassTotals, PassView, Recipe, _schedule_config
from megatron_fbt.training.checkpoint import Checkpointer
from megatron_fbt.training.run_folder import TrainerState
from tests.distributed.model_case import Built, Case, Grid, build, start

VOCAB, S, ROWS = 1003, 24, 3
SHAPE = {
    "model.num_layers": 4,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_query_groups": 2,
    "model.kv_channels": 12,
    "model.ffn_hidden_size": 88,
    "model.qk_layernorm": True,
    "model.layernorm_epsilon": 3e-4,
    "model.rotary_base": 54321.0,
    "model.vocab_size": VOCAB,
    "model.make_vocab_size_divisible_by": 8,
    "data.sequence_length": S,
}
OPTIONS = {
    "feedback.fusion": "concat",
    "model.attention_output_gate": True,
    "model.add_qkv_bias": True,
    "model.residual_multiplier": 0.8,
    "model.sliding_window": 7,
    "model.window_attn_skip_freq": 3,
    "model.scaled_init": False,
    "data.reset_attention_mask": True,
    "data.reset_position_ids": True,
}
"""Of the untied model; the tied one has the defaults."""
DOCUMENT_STARTS = (0, 5, 14)
"""In every row."""
SPLIT = Grid(tensor=2, pipeline=2)
FIRST, AGAIN = "step_00000007", "step_00000008"


def case(folder: Path, tied: bool) -> Case:
    """The model under test; its tokenizer lies in `folder`."""
    tokenizer = {"data.tokenizer.type": "huggingface", "data.tokenizer.path": str(folder / "tokenizer")}
    options = {} if tied else OPTIONS
    return Case("", {**SHAPE, **tokenizer, **options, "model.share_embeddings_and_output_weights": tied})


def token_rows() -> torch.Tensor:
    """[b, s] token ids, first and last id among them."""
    tokens = torch.randint(0, VOCAB, (ROWS, S), generator=torch.Generator().manual_seed(8))
    tokens[0, 3], tokens[1, 5] = 0, VOCAB - 1
    return tokens


def document_starts() -> torch.Tensor:
    """[b, s] bool, of the same rows."""
    starts = torch.zeros(ROWS, S, dtype=torch.bool)
    starts[:, list(DOCUMENT_STARTS)] = True
    return starts


def scatter_weights(built: Built) -> None:
    """Move every weight far from its initial value, equally on all ranks that share it, padding excepted."""
    layout = built.layout
    with torch.no_grad():
        for name, param in built.stage.global_parameters().items():
            generator = torch.Generator().manual_seed(len(name) + 31 * sum(map(ord, name)))
            if name.endswith(".bias"):
                param.copy_(torch.rand(param.shape, generator=generator) - 0.5)
                continue
            if param.dim() == 1:
                param.mul_(torch.rand(param.shape, generator=generator) + 0.5)
                continue
            shared = torch.rand(param.shape, generator=generator) + 0.5  # every shard by the same factors
            param.mul_(shared * (4.0 if not name.startswith("fusion.") else 1.5))
    built.optimizer.megatron.reload_model_params()
    assert layout.tensor_size in (1, 2)


class LogitsView(PassView):
    """A pass that keeps its logits instead of a loss."""

    def _weighted_loss(self, states, batch):
        parts = self.stage.logits(states.detach())
        group, size = self.stage.tp_group, self.stage.layout.tensor_size
        gathered: List[torch.Tensor] = [torch.empty_like(parts) for _ in range(size)]
        dist.all_gather(gathered, parts.contiguous(), group=group)
        self.totals.nll[self.vp_stage] = float("nan")  # no loss is asked for
        self.kept.append(torch.cat(gathered, dim=-1))
        return states.sum() * 0


@torch.no_grad()
def native_logits(built: Built) -> Dict[int, torch.Tensor]:
    """{K: logits [b, s, padded vocabulary] of the last of K passes}, on the last stage; empty elsewhere."""
    from megatron_fbt.data.batch import MicroBatch

    stage, tokens = built.stage.eval(), token_rows()
    batch = MicroBatch(tokens, tokens, torch.ones(tokens.shape), document_starts(), torch.arange(ROWS))
    recipe = Recipe(built.config.feedback, 1, training=False)
    found = {}
    for passes in (1, 2, 3):
        config, totals = _schedule_config(stage, passes), PassTotals(passes, built.layout.device)
        views = [LogitsView(stage, k, [1.0] * passes, recipe, totals, config) for k in range(passes)]
        kept: List[torch.Tensor] = []
        for view in views:
            view.kept = kept
        _run(views, [batch, batch])
        if built.layout.is_last_stage:
            found[passes] = kept[-1].transpose(0, 1).contiguous()
    return found


def _run(views: List[PassView], batches: list) -> None:
    """Forward through the schedule that training uses on two stages."""

    def forward_step(iterator, view):
        output = view(next(iterator))
        return output, lambda loss: (loss, torch.zeros((), dtype=torch.int), {})

    shape = {"num_microbatches": len(batches), "seq_length": S, "micro_batch_size": ROWS, "forward_only": True}
    if len(views) == 1:
        schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step, data_iterator=iter(batches), model=views[0], **shape
        )
    else:
        schedules.forward_backward_pipelining_with_interleaving(
            forward_step_func=forward_step, data_iterator=[iter(batches) for _ in views], model=views, **shape
        )


def save(built: Built, folder: Path, step: int) -> None:
    """A checkpoint as training writes it."""
    writer = Checkpointer(folder / "checkpoints", None, built.layout)
    state = TrainerState(step=step, updates=0)
    writer.save(built.stage, built.optimizer, state, dump_yaml(built.config))


def save_and_measure(rank: int, world_size: int, folders: Dict[bool, str]) -> Dict[bool, Tuple[Any, int]]:
    """Four processes: save both models from TP 2 x PP 2; {tied: (native logits, padded rows)}."""
    layout = start(SPLIT)
    found = {}
    for tied, folder in folders.items():
        built = build(case(Path(folder), tied), SPLIT, layout)
        scatter_weights(built)
        save(built, Path(folder) / "split", 7)
        rows = built.stage.embedding.word_embeddings.weight.size(0) * 2 if layout.is_first_stage else 0
        found[tied] = (native_logits(built), rows)
    return found


def load_and_save_again(rank: int, world_size: int, folders: Dict[bool, str]) -> None:
    """One or two processes: load what four have saved and save it from this layout."""
    grid = Grid(tensor=world_size)
    layout = start(grid)
    for tied, folder in folders.items():
        built = build(case(Path(folder), tied), grid, layout)
        reader = Checkpointer(Path(folder) / "split" / "checkpoints", None, layout)
        state = reader.load(Path(folder) / "split" / "checkpoints" / FIRST, built.stage, built.optimizer)
        assert state.step == 7
        save(built, Path(folder) / f"tp{world_size}", 8)
    parallel_state.destroy_model_parallel()
