"""What test_chunked_loss.py asserts on: the loss over chunks beside the one over whole logits, on one rank."""

import dataclasses
from typing import Any, Dict, List, Optional, Tuple

import torch

from megatron_fbt.config.plan import padded_vocab_size
from megatron_fbt.core.grad_sync import reduce_gradients
from megatron_fbt.core.schedule import run_passes
from megatron_fbt.core.stage import FBTStage
from tests.distributed.model_case import Built, Case, Grid, build, global_batch, own_part, start

MODELS: Dict[str, Dict[str, Any]] = {
    "tied": {},
    "untied": {"model.share_embeddings_and_output_weights": False, "parallel.overlap_grad_reduce": True},
    "padded": {
        "model.vocab_size": 500,
        "model.make_vocab_size_divisible_by": 512,
        "optimizer.sharding": "megatron",
        "training.z_loss.coefficient": 0.01,
    },
    "bf16": {"precision.dtype": "bf16", "memory.recompute": "full"},
}
"""With two tensor-parallel ranks the second of "padded" holds padding alone."""
TOKENS_IN_CHUNK = (7, 10_000)
"""64 tokens are in a micro-batch."""
Z_LOSS = 0.05


def chunk_by(stage: FBTStage, tokens: int) -> None:
    """Let chunks have that many tokens."""
    stage.loss_shard = dataclasses.replace(stage.loss_shard, chunk_bytes=4 * stage.head_weight().size(0) * tokens)


def without_buffers(built: Built) -> FBTStage:
    """The same model without gradient buffers, as DeepSpeed's optimizers have it."""
    model = built.config.model
    rows = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, built.layout.tensor_size)
    return FBTStage(built.config, built.layout, built.stage.vocab_size, rows)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found - expected).double().norm() / expected.double().norm().clamp_min(1e-30)).item()


def head_gradients(stage: FBTStage, states: torch.Tensor, z_loss: bool) -> Tuple[torch.Tensor, ...]:
    """Objective, losses, and gradients of the states and of the head's weight, from an empty buffer or none."""
    leaf, weight = states.clone().requires_grad_(), stage.head_weight()
    weight.grad = None
    if hasattr(weight, "main_grad"):
        weight.main_grad.zero_()
    batch = global_batch(0, stage.vocab_size)[0]
    weights = batch.loss_mask.t() * 0.7
    objective, losses, _ = stage.objective(leaf, batch.labels, weights, Z_LOSS * weights if z_loss else None)
    objective.backward()
    found = weight.main_grad.clone() if hasattr(weight, "main_grad") else weight.grad.clone()
    return objective.detach(), losses.detach(), leaf.grad, found


def head(model: str, grid: Grid, layout) -> Dict[str, List[float]]:
    """Relative differences of the loss alone: with a gradient buffer and, by computing logits twice, without."""
    built, found = build(Case("", MODELS[model]), grid, layout), {}
    second = without_buffers(built)  # building is collective: the stages tie their embeddings
    if not built.stage.post_process:
        return found
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(32, 2, 64, generator=generator)[layout.own_rows(32)].to(built.stage.config.params_dtype)
    for way, stage in {"once": built.stage, "twice": second}.items():
        assert hasattr(stage.head_weight(), "main_grad") == (way == "once")
        shard = stage.loss_shard
        for z_loss in (False, True):
            stage.loss_shard = None
            expected = head_gradients(stage, states, z_loss)
            for tokens in TOKENS_IN_CHUNK:
                stage.loss_shard = shard
                chunk_by(stage, tokens)
                got = head_gradients(stage, states, z_loss)
                found[f"{way}, {tokens} tokens, z-loss {z_loss}"] = [relative(a, b) for a, b in zip(got, expected)]
    return found


def step(model: str, grid: Grid, layout, chunked: Optional[bool]) -> Dict[str, Any]:
    """Losses, norm of the gradients and every gradient of a three-pass step after a two-pass one."""
    built = build(Case("", {**MODELS[model], "memory.chunked_loss": chunked}), grid, layout)
    if built.stage.post_process and chunked is None:
        chunk_by(built.stage, 11)
    reports = []
    for number, passes in enumerate((2, 3)):
        built.optimizer.zero_grad()
        totals = built.run(global_batch(number, built.stage.vocab_size)[layout.data_rank :: layout.data_size], passes)
        if number == 0:
            reports.append(built.optimizer.step(totals, True, False))
    reduce_gradients(built.optimizer.model)
    gradients = {name: param.main_grad.clone() for name, param in built.stage.named_parameters()}
    return {"losses": [*reports[0].loss_per_pass, *totals.nll.tolist(), totals.z_loss.item()], "gradients": gradients}


def measure(rank: int, world_size: int, grid: Grid, models: List[str]) -> Dict[str, Any]:
    """For each model: `head` of one loss, and the differences of whole steps."""
    layout, found = start(grid), {}
    if world_size == 1:
        found["kept"] = kept(layout)
    for model in models:
        chunked, whole = (step(model, grid, layout, value) for value in (None, False))
        difference = {name: relative(chunked["gradients"][name], g) for name, g in whole["gradients"].items()}
        losses = relative(torch.tensor(chunked["losses"]), torch.tensor(whole["losses"]))
        found[model] = {"head": head(model, grid, layout), "losses": losses, "gradients": difference}
    return found


class Sizes(torch.autograd.graph.saved_tensors_hooks):
    """Collects the number of elements of every tensor that autograd keeps, but for one that is there anyway."""

    def __init__(self, but: torch.Tensor):
        self.kept: List[int] = []
        self.but = but.data_ptr()
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() != self.but:
            self.kept.append(tensor.numel())
        return tensor


def kept(layout) -> Dict[str, int]:
    """Elements of the largest tensor that the loss of a pass keeps for its backward: by chunks once, twice, whole."""
    found = {}
    built = build(Case("", {"model.share_embeddings_and_output_weights": False}), Grid(), layout)
    batch, states = global_batch(0)[0], torch.randn(32, 2, 64, requires_grad=True)
    for way, stage in {"once": built.stage, "twice": without_buffers(built), "whole": built.stage}.items():
        if way == "whole":
            stage.loss_shard = None
        sizes = Sizes(but=stage.head_weight())
        with sizes:
            stage.objective(states, batch.labels, batch.loss_mask.t(), None)
        found[way] = max(sizes.kept)
    return found


def zero(rank: int, world_size: int) -> Dict[str, List[Any]]:
    """Two steps under DeepSpeed's optimizers: losses and gradient norms of whole logits, and of chunks."""
    layout, found = start(Grid(data=world_size)), {}
    for sharding in ("zero1", "zero2"):
        for chunked in (None, True):
            settings = {"optimizer.sharding": sharding, "memory.chunked_loss": chunked}
            batch = {"training.micro_batch_size": 2, "training.global_batch_size": 16}
            built = build(Case("", {**settings, **batch}), Grid(data=world_size), layout)
            assert (built.stage.loss_shard is not None) == bool(chunked)
            if chunked:
                chunk_by(built.stage, 11)
            reports = []
            for number in range(2):
                built.optimizer.zero_grad()
                batches, through = own_part(global_batch(number), layout), built.optimizer.through
                totals = run_passes(built.stage, batches, 2, built.recipe, through=through)
                reports.append(built.optimizer.step(totals, True, False))
            found.setdefault(sharding, []).append([[*r.loss_per_pass, r.grad_norm] for r in reports])
    return found
