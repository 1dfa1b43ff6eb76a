"""What test_recipe_parity.py asserts on: several layouts in one launch, each measured with the same rows."""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from megatron.core import parallel_state

from megatron_fbt.config.feedback import MAX_PASSES
from megatron_fbt.core.grad_sync import reduce_gradients
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import PassTotals, PassView, run_passes
from megatron_fbt.data.batch import MicroBatch, document_starts
from megatron_fbt.data.sampler import micro_batch_sample_ids
from megatron_fbt.feedback.jitter import jitter_noise
from megatron_fbt.model.loss import pass_loss_weights
from megatron_fbt.training.lr_schedule import LearningRate
from megatron_fbt.training.optimizer import StepReport, total_loss
from tests.distributed.model_case import EOD, Built, Case, Grid, Piece, build, piece, start

VOCAB = 103
S, D = 16, 16
MASKED = (1, 7, 0, 16)
"""Loss tokens of the four rows of a global batch."""
Z_LOSS = {"training__z_loss__coefficient": 0.02}
RECIPES = {1: {}, 2: Z_LOSS, 3: {**Z_LOSS, "feedback__loss_weights__warmup_steps": 4}}
"""{K: settings of the steps that are cut in several ways}."""
SMALL = {
    "model.num_layers": 2,
    "model.hidden_size": D,
    "model.num_attention_heads": 2,
    "model.num_query_groups": 2,
    "model.ffn_hidden_size": 24,
    "model.vocab_size": VOCAB,
    "data.sequence_length": S,
    "optimizer.weight_decay": 0.1,
    "optimizer.lr": 0.01,
}


def small(name: str = "", divisible_by: int = 4, **overrides: Any) -> Case:
    """A small model; overrides are fields with __ for the dot."""
    fields = {key.replace("__", "."): value for key, value in overrides.items()}
    return Case(name, {**SMALL, "model.make_vocab_size_divisible_by": divisible_by, **fields})


def rows(loss_tokens: Sequence[int] = MASKED) -> MicroBatch:
    """The whole global batch: sample i has loss_tokens[i] loss tokens, scattered."""
    generator = torch.Generator().manual_seed(11)
    text = torch.randint(1, VOCAB, (len(loss_tokens), S + 1), generator=generator)
    text[0, 5] = text[1, 8] = text[3, 2] = EOD
    tokens = text[:, :-1].contiguous()
    mask = torch.zeros(len(loss_tokens), S)
    for row, count in zip(mask, loss_tokens):
        row[torch.randperm(S, generator=generator)[:count]] = 1.0
    numbers = torch.arange(len(loss_tokens))
    return MicroBatch(tokens, text[:, 1:].contiguous(), mask, document_starts(tokens, EOD), numbers)


def cut(batch: MicroBatch, micro_batch_size: int, layout: Layout) -> List[MicroBatch]:
    """This rank's micro-batches, as the sampler deals them out."""
    ids = micro_batch_sample_ids(0, len(batch.tokens), micro_batch_size, layout.data_rank, layout.data_size)
    fields = (batch.tokens, batch.labels, batch.loss_mask, batch.document_starts, batch.sample_ids)
    return [MicroBatch(*(field[torch.tensor(part)] for field in fields)) for part in ids]


@dataclass
class Step:
    """Gradients of the mean loss, and what one optimizer step reported."""

    gradients: Piece
    report: StepReport
    weights: Piece


def one_step(built: Built, batch: MicroBatch, micro_batch_size: int, passes: int) -> Step:
    """Gradient and update of one global batch in this layout, from the weights as they are."""
    named = dict(built.stage.named_parameters())
    micro_batches = cut(batch, micro_batch_size, built.layout)
    tokens = max(batch.loss_mask.sum().item(), 1.0)
    built.optimizer.zero_grad()
    run_passes(built.stage, micro_batches, passes, built.recipe)
    reduce_gradients(built.optimizer.model)
    gradients = piece(built, {name: param.main_grad / tokens for name, param in named.items()})
    built.optimizer.zero_grad()
    totals = run_passes(built.stage, micro_batches, passes, built.recipe)
    LearningRate(built.config.optimizer, 0, 1000).apply(built.optimizer, 0)  # sets the weight decay of each group too
    report = built.optimizer.step(totals, True, False)
    return Step(gradients, report, piece(built, named))


def by_formula(built: Built, batch: MicroBatch, passes: int) -> Tuple[List[float], Piece, float]:
    """Loss of each pass, gradients of the objective and its z-loss, by autograd alone, all rows at once."""
    stage, recipe = built.stage, built.recipe
    for param in stage.parameters():
        del param.main_grad  # nothing goes past autograd
    inputs, losses, squares = stage.first_inputs(batch.tokens, None, None), [], []
    for k in range(1, passes + 1):
        if k > 1:
            noise = jitter_noise(recipe.jitter_scale, batch.sample_ids, torch.arange(S), k, D, recipe.seed)
            inputs = stage.first_inputs(batch.tokens, states + noise, recipe.fused(batch, k).t())  # noqa: F821
        states = stage.run_layers(inputs, batch.document_starts)
        nll = stage.losses(states, batch.labels) * batch.loss_mask.t()
        losses.append(nll.sum() / batch.loss_mask.sum())
        normalizers = torch.logsumexp(stage.logits(states)[..., :VOCAB], dim=-1)
        squares.append((normalizers**2 * batch.loss_mask.t()).sum() / batch.loss_mask.sum())
    named = dict(stage.named_parameters())
    weights = pass_loss_weights(recipe.feedback.loss_weights, passes, recipe.extra_factor)
    z_loss = recipe.z_loss * sum(weight * square for weight, square in zip(weights, squares))
    objective = total_loss(losses, recipe.feedback.loss_weights, recipe.extra_factor) + z_loss
    found = torch.autograd.grad(objective, list(named.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(param) if grad is None else grad for (name, param), grad in zip(named.items(), found)
    }
    return [loss.item() for loss in losses], piece(built, gradients), z_loss.item()


def loss_mask_cuts(layout: Layout, grid: Grid, sizes: Sequence[int]) -> Dict[Any, Step]:
    """{(micro-batch size, K): one step}; with the key "empty" a batch without loss tokens."""
    found: Dict[Any, Any] = {}
    for size in sizes:
        for passes in (1, 2, 3):
            found[size, passes] = one_step(build(small(**RECIPES[passes]), grid, layout), rows(), size, passes)
    built = build(small(), grid, layout)
    found["before"] = piece(built, dict(built.stage.named_parameters()))
    found["empty"] = one_step(built, rows((0, 0, 0, 0)), sizes[0], 3)
    return found


def padded_vocabulary(layout: Layout, grid: Grid) -> Dict[Any, Any]:
    """{(tied, divisible by): gradients, three steps, padded rows seen, largest value in them}."""
    found = {}
    for tied in (True, False):
        for divisible in (1, 8, 128):
            settings = {} if tied else Z_LOSS
            case = small("", divisible, model__share_embeddings_and_output_weights=tied, **settings)
            built = build(case, grid, layout)
            steps = [one_step(built, rows(), 2, passes) for passes in (3, 1, 2)]
            padding, largest = 0, 0.0
            for name, param in built.stage.global_parameters().items():
                if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                    extra = param[max(VOCAB - layout.tensor_rank * len(param), 0) :]
                    padding += len(extra)
                    largest = max(largest, extra.abs().max().item() if len(extra) else 0.0)
            found[tied, divisible] = (steps, padding, largest)
    return found


def drawn(layout: Layout, grid: Grid) -> Dict[Any, Tuple[torch.Tensor, torch.Tensor]]:
    """{(granularity, K): (jitter, fused)} that this rank gives to its first stage."""
    found: Dict[Any, Any] = {}
    for granularity in ("row", "document"):
        built, batch = build(small("", feedback__prefix__granularity=granularity), grid, layout), rows()
        shard = S // layout.sequence_shards
        for pass_number in (2, 3):
            seen = []
            built.stage.first_inputs = lambda tokens, states, fused, seen=seen: seen.append((states, fused))
            totals = PassTotals(3, layout.device)
            view = PassView(built.stage, pass_number - 1, [1.0] * 3, built.recipe, totals, built.stage.config)
            view.set_input_tensor(torch.zeros(shard, 4, D))
            view._first_inputs(batch)
            found[granularity, pass_number] = seen[0]
    return found


def reach(layout: Layout, grid: Grid) -> Tuple[torch.Tensor, torch.Tensor]:
    """Which states each fused input depends on: [b, s, s/tp] bool, and the positions that are fused [b, s]."""
    built, batch = build(small(), grid, layout), rows()
    shard = S // layout.sequence_shards
    begin = layout.tensor_rank * shard if layout.sequence_shards > 1 else 0
    fused = ~batch.document_starts
    states = torch.randn(S, 4, D, generator=torch.Generator().manual_seed(2))[begin : begin + shard].requires_grad_()
    table = torch.zeros(4, S, shard, dtype=torch.bool)
    for t in range(S):
        states.grad = None
        inputs = built.stage.first_inputs(batch.tokens, states, fused.t()[begin : begin + shard])
        weights = torch.linspace(-1, 2, D) * torch.zeros(shard, 1, 1).expand(shard, 1, D)
        if begin <= t < begin + shard:
            weights = weights.clone()
            weights[t - begin] = torch.linspace(-1, 2, D)
        (inputs * weights).sum().backward()
        table[:, t] = states.grad.abs().sum(-1).t() > 0
    return table, fused


def changed_document(layout: Layout, grid: Grid) -> Dict[str, torch.Tensor]:
    """First inputs of pass 2 before and after the tokens of row 1's first document (positions 0 to 8) were changed."""
    found = {}
    for name, change in (("before", 0), ("after", 1)):
        built, batch = build(small("", feedback__prefix__probability=0.0), grid, layout), rows()
        batch.tokens[1, :8] = (batch.tokens[1, :8] + change - 1) % (VOCAB - 1) + 1
        with torch.no_grad():
            states = built.stage.run_layers(built.stage.first_inputs(batch.tokens, None, None), batch.document_starts)
            found[f"states {name}"] = states[:, 1]
            fused = built.recipe.fused(batch, 2).t()
            found[f"inputs {name}"] = built.stage.first_inputs(batch.tokens, states, fused)[:, 1]
    return found


def in_layout(grid: Grid, measures: Dict[str, Any]) -> Dict[str, Any]:
    """Results of {name: function(layout)} in one layout, which is left afterwards."""
    layout = start(grid)
    try:
        return {name: measure(layout) for name, measure in measures.items()}
    finally:
        parallel_state.destroy_model_parallel()


def one_process(rank: int, world_size: int) -> Dict[str, Any]:
    """The reference and everything that one process can do."""
    grid = Grid()

    def formula(layout: Layout) -> Dict[int, Any]:
        return {
            passes: by_formula(build(small(**RECIPES[passes]), grid, layout), rows(), passes) for passes in (1, 2, 3)
        }

    measures = {
        "formula": formula,
        "cuts": lambda layout: loss_mask_cuts(layout, grid, (4, 1)),
        "deep": lambda layout: one_step(build(small(), grid, layout), rows(), 1, MAX_PASSES),
        "padding": lambda layout: padded_vocabulary(layout, grid),
        "drawn": lambda layout: drawn(layout, grid),
        "reach": lambda layout: reach(layout, grid),
        "document": lambda layout: changed_document(layout, grid),
    }
    return in_layout(grid, measures)


def two_processes(rank: int, world_size: int) -> Dict[str, Any]:
    """Results by the layout's name."""
    found: Dict[str, Optional[Dict[str, Any]]] = {}
    for grid in (Grid(tensor=2), Grid(tensor=2, sequence_parallel=True)):
        measures = {
            "padding": lambda layout, grid=grid: padded_vocabulary(layout, grid),
            "drawn": lambda layout, grid=grid: drawn(layout, grid),
            "reach": lambda layout, grid=grid: reach(layout, grid),
        }
        found[str(grid)] = in_layout(grid, measures)
    for grid in (Grid(data=2), Grid(pipeline=2)):
        measures = {"cuts": lambda layout, grid=grid: loss_mask_cuts(layout, grid, (1,))}
        if grid.pipeline > 1:
            measures["deep"] = lambda layout, grid=grid: one_step(build(small(), grid, layout), rows(), 1, MAX_PASSES)
        found[str(grid)] = in_layout(grid, measures)
    return found
