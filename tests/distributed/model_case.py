"""Small models and batches for tests that compare layouts, and the code that runs them on one rank."""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence

import torch

from megatron_fbt.config.plan import padded_vocab_size
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.grad_sync import reduce_gradients
from megatron_fbt.core.parallel import Layout, initialize_parallel
from megatron_fbt.core.schedule import PassTotals, Recipe, run_passes
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.data.batch import MicroBatch, document_starts
from megatron_fbt.training.build_optimizer import build_optimizer
from megatron_fbt.training.optimizer import Optimizer

EOD = 0
ROWS, SEQUENCE, MICRO = 16, 32, 2


@dataclass(frozen=True)
class Grid:
    """A layout under test."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        sequence = "+sp" if self.sequence_parallel else ""
        return f"tp{self.tensor}pp{self.pipeline}dp{self.data}{sequence}"


@dataclass(frozen=True)
class Case:
    """A model and a recipe under test; `overrides` are dotted configuration fields."""

    name: str
    overrides: Dict[str, Any] = field(default_factory=dict)
    passes: Sequence[int] = (1, 2, 1, 3, 2)
    uneven: bool = False
    """Three layers on the first of two pipeline stages, one on the last."""

    def config(self, grid: Grid) -> PretrainConfig:
        """The whole configuration of the case in a layout."""
        config = PretrainConfig()
        small = {
            "model.num_layers": 4,
            "model.hidden_size": 64,
            "model.num_attention_heads": 4,
            "model.num_query_groups": 2,
            "model.ffn_hidden_size": 96,
            "model.vocab_size": 1003,
            "model.make_vocab_size_divisible_by": 4,
            "precision.dtype": "fp32",
            "data.sequence_length": SEQUENCE,
            "optimizer.lr": 3e-3,
            "optimizer.clip_grad": 0.6,
            "parallel.tensor_model_parallel_size": grid.tensor,
            "parallel.pipeline_model_parallel_size": grid.pipeline,
            "parallel.sequence_parallel": grid.sequence_parallel,
        }
        if self.uneven and grid.pipeline == 2:
            small["parallel.num_layers_in_last_pipeline_stage"] = 1
        for name, value in {**small, **self.overrides}.items():
            section, attribute = name.rsplit(".", 1)
            target = config
            for part in section.split("."):
                target = getattr(target, part)
            assert hasattr(target, attribute), name
            setattr(target, attribute, value)
        return config


@dataclass
class Built:
    """A case's model on this rank."""

    config: PretrainConfig
    layout: Layout
    stage: FBTStage
    optimizer: Optimizer

    @property
    def recipe(self) -> Recipe:
        """The training recipe of the case, in the first step of a warm-up and of a z-loss if it has them."""
        feedback, z_loss = self.config.feedback, self.config.training.z_loss.coefficient
        factor = feedback.loss_weights.extra_factor(0, 0)
        return Recipe(feedback, self.config.run.seed, training=True, extra_factor=factor, z_loss=z_loss)

    def run(self, batches: List[MicroBatch], passes: int) -> PassTotals:
        """Forward and backward of one step, as the trainer calls them."""
        return run_passes(self.stage, batches, passes, self.recipe, on_last_backward=self.optimizer.on_last_backward)


def build(case: Case, grid: Grid, layout: Layout) -> Built:
    """Build the case's model and optimizer in an initialised layout."""
    config = case.config(grid)
    vocab = config.model.vocab_size
    padded = padded_vocab_size(vocab, config.model.make_vocab_size_divisible_by, grid.tensor)
    stage = FBTStage(config, layout, vocab, padded)
    return Built(config, layout, stage, build_optimizer(config, stage, layout, bucket_size=20_000))


def start(grid: Grid) -> Layout:
    """Join the layout from an initialised process group."""
    return initialize_parallel(Case("").config(grid).parallel, seed=1)


def global_batch(step: int, vocab: int = 1003, mask: Optional[torch.Tensor] = None) -> List[MicroBatch]:
    """All micro-batches of one step: random rows with document ends and a random loss mask."""
    generator = torch.Generator().manual_seed(100 + step)
    text = torch.randint(1, vocab, (ROWS, SEQUENCE + 1), generator=generator)
    text[torch.rand(text.shape, generator=generator) < 0.06] = EOD
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if mask is None:
        mask = (torch.rand(tokens.shape, generator=generator) < 0.9).float()
    starts = document_starts(tokens, EOD)
    numbers = torch.arange(ROWS) + ROWS * step
    parts = (x.split(MICRO) for x in (tokens, labels, mask, starts, numbers))
    return [MicroBatch(*part) for part in zip(*parts)]


def own_part(batch: List[MicroBatch], layout: Layout) -> List[MicroBatch]:
    """Micro-batches of this data-parallel rank, as the sampler deals them out."""
    return batch[layout.data_rank :: layout.data_size]


@dataclass
class Piece:
    """What one rank holds of a set of tensors, by global name."""

    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    tensors: Dict[str, torch.Tensor]
    splits: Dict[str, Optional[int]]


def piece(built: Built, tensors: Dict[str, torch.Tensor]) -> Piece:
    """This rank's piece; `tensors` is by the stage's own parameter names."""
    layout, named = built.layout, dict(built.stage.named_parameters())
    local = {id(param): name for name, param in named.items()}
    names = {name: local[id(param)] for name, param in built.stage.global_parameters().items()}
    splits = {
        name: named[own].partition_dim if getattr(named[own], "tensor_model_parallel", False) else None
        for name, own in names.items()
    }
    copies = {name: tensors[own].detach().clone() for name, own in names.items()}
    return Piece(layout.tensor_rank, layout.pipeline_rank, layout.data_rank, copies, splits)


def whole(pieces: List[Piece], vocab: int = 1003) -> Dict[str, torch.Tensor]:
    """Put the whole tensors together. Fails if copies of one tensor are not equal bit for bit."""
    joined: Dict[str, List[torch.Tensor]] = {}
    replicas = sorted({(p.pipeline_rank, p.data_rank) for p in pieces})
    for replica in replicas:
        group = sorted((p for p in pieces if (p.pipeline_rank, p.data_rank) == replica), key=lambda p: p.tensor_rank)
        for name in group[0].tensors:
            joined.setdefault(name, []).append(_join(name, group))
    for name, copies in joined.items():
        for other in copies[1:]:
            assert torch.equal(copies[0], other), f"copies of {name} differ"
    result = {name: copies[0] for name, copies in joined.items()}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in result:
            result[name] = result[name][:vocab]
    return result


def _join(name: str, group: List[Piece]) -> torch.Tensor:
    parts, split = [p.tensors[name] for p in group], group[0].splits[name]
    if split is None:
        for other in parts[1:]:
            assert torch.equal(parts[0], other), f"{name} differs between tensor-parallel ranks"
        return parts[0]
    if name.endswith("linear_fc1.weight"):  # each rank holds its gate rows, then its up rows
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(parts, dim=split)


@dataclass
class Outcome:
    """What one rank saw of a case."""

    first: Dict[int, Any]
    """{K: (summed loss of each pass, loss tokens, gradients of the sum)} at the initial weights."""
    steps: List[Any]
    """A StepReport for each of the case's steps."""
    initial: Piece
    final: Piece


def run_case(case: Case, grid: Grid, layout: Layout) -> Outcome:
    """First-step gradients for every K of the case, then its optimizer steps."""
    built = build(case, grid, layout)
    weights = {name: param for name, param in built.stage.named_parameters()}
    initial = piece(built, weights)
    first = {}
    for passes in sorted(set(case.passes)):
        built.optimizer.zero_grad()
        totals = built.run(own_part(global_batch(0), layout), passes)
        reduce_gradients(built.optimizer.model)
        if case.config(grid).optimizer.sharding == "none":
            gradients = piece(built, {name: param.main_grad for name, param in weights.items()})
            first[passes] = (totals.nll.tolist(), totals.tokens.item(), gradients)
    steps, active = [], False
    for step, passes in enumerate(case.passes):
        active = active or passes > 1
        built.optimizer.zero_grad()
        totals = built.run(own_part(global_batch(step), layout), passes)
        steps.append(built.optimizer.step(totals, active, False))
    return Outcome(first, steps, initial, piece(built, weights))


def run_cases(rank: int, world_size: int, grid: Grid, cases: Sequence[Case]) -> List[Outcome]:
    """Run several cases in one layout; the function that test processes start with."""
    layout = start(grid)
    return [run_case(case, grid, layout) for case in cases]
