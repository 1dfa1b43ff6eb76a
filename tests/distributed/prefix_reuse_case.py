"""What test_prefix_reuse.py asserts on: steps with and without prefix reuse, on one rank."""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fbt.core.grad_sync import reduce_gradients
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import Recipe, run_passes
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.data.batch import MicroBatch
from megatron_fbt.feedback.diagnostics import PassDiagnostics
from tests.distributed.model_case import MICRO, SEQUENCE, Built, Case, Grid, build, global_batch, own_part, start

MICRO_BATCHES = 4


def plain(length: int) -> Dict[str, Any]:
    """Settings that make the first `length` positions of every row plain."""
    return {"feedback.prefix.low": (length - 1) / SEQUENCE, "feedback.prefix.high": (length - 1) / SEQUENCE}


DOCUMENTS = {
    "data.reset_attention_mask": True,
    "data.reset_position_ids": True,
    "model.sliding_window": 9,
    "model.window_attn_skip_freq": 2,
}
CASES: Dict[str, Tuple[Dict[str, Any], Sequence[int]]] = {
    "random": ({}, (2, 3, 1)),
    "p = 1": (plain(1), (3,)),
    "p = T/2": ({**plain(SEQUENCE // 2), "memory.chunked_loss": False}, (2, 3)),
    "p = T - 1": ({**plain(SEQUENCE - 1), "model.share_embeddings_and_output_weights": False}, (3,)),
    "p = T": ({**plain(SEQUENCE), "training.z_loss.coefficient": 0.01}, (3,)),
    "packed documents": (
        {
            **DOCUMENTS,
            "feedback.fusion": "concat",
            "memory.recompute": "full",
            "model.share_embeddings_and_output_weights": False,
            "model.qk_layernorm": True,
            "model.add_qkv_bias": True,
            "feedback.prefix.granularity": "document",
            "training.z_loss.coefficient": 0.01,
        },
        (2, 3),
    ),
    "windows": (
        {
            "model.sliding_window": 7,
            "model.attention_output_gate": True,
            "feedback.fusion": "add",
            "memory.recompute": "selective",
            "model.input_norm": "none",
            "feedback.loss_weights.extra_passes": 0.7,
            "feedback.loss_weights.per_pass": [1.0, 2.0],
            "feedback.prefix.low": 0.3,
            "optimizer.sharding": "megatron",
            "parallel.overlap_grad_reduce": True,
        },
        (3,),
    ),
    "early": (
        {
            **DOCUMENTS,
            "memory.recompute": "full",
            "memory.recompute_passes": "early",
            "feedback.prefix.probability": 0.8,
        },
        (3,),
    ),
    "early attention": ({"memory.recompute": "selective", "memory.recompute_passes": "early"}, (3,)),
    "some empty": ({"training.z_loss.coefficient": 0.01}, (2, 3)),
    "prompts": ({"feedback.prefix.granularity": "prompt", "feedback.fusion": "add"}, (3,)),
}


class SomeEmpty(Recipe):
    """A pass fuses nothing in every second micro-batch: before or after a pass that does, where there are three."""

    def fused(self, batch: MicroBatch, pass_number: int) -> torch.Tensor:
        """[b, s] bool."""
        keep = (batch.sample_ids // MICRO + pass_number) % 2 == 1
        return super().fused(batch, pass_number) & keep[:, None]


@dataclass
class Step:
    """One step's sums and gradients, the rows that the layers of this rank computed, and in how many calls."""

    sums: List[float]
    gradients: Dict[str, torch.Tensor]
    rows: int
    calls: int
    diagnostics: Dict[str, float] = field(default_factory=dict)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found - expected).double().norm() / expected.double().norm().clamp_min(1e-30)).item()


class RowCount:
    """Counts the positions that a stage's layers are called for."""

    def __init__(self, stage: FBTStage):
        self.rows, self.calls, run = 0, 0, stage.run_layers

        def run_layers(hidden: torch.Tensor, *arguments):
            self.rows += hidden.size(0)
            self.calls += 1
            return run(hidden, *arguments)

        stage.run_layers = run_layers


def take_step(built: Built, recipe: Recipe, batches: List[MicroBatch], passes: int, count: RowCount) -> Step:
    """Forward, backward and reduction, from the weights as they are."""
    built.optimizer.zero_grad()
    built.stage.train()
    count.rows, count.calls, diagnostics = 0, 0, PassDiagnostics(passes, built.layout)
    totals = run_passes(
        built.stage,
        batches,
        passes,
        recipe,
        on_last_backward=built.optimizer.on_last_backward,
        diagnostics=diagnostics,
    )
    reduce_gradients(built.optimizer.model)
    gradients = {name: param.main_grad.clone() for name, param in built.stage.named_parameters()}
    sums = [*totals.nll.tolist(), totals.z_loss.item()]
    return Step(sums, gradients, count.rows, count.calls, diagnostics.reduce())


def recipe_of(name: str, built: Built) -> Recipe:
    """The recipe of a case."""
    return SomeEmpty(**vars(built.recipe)) if name == "some empty" else built.recipe


def batches_of(name: str, passes: int, layout: Layout) -> List[MicroBatch]:
    """This rank's micro-batches; where the data mark prompts, these have several lengths and one has no answer."""
    batches = own_part(global_batch(passes)[: MICRO_BATCHES * layout.data_size], layout)
    if name == "prompts":
        for batch in batches:
            prompt = 5 + batch.sample_ids * 7 % SEQUENCE
            batch.feedback_region = torch.arange(SEQUENCE) >= prompt[:, None]
    return batches


def compare(name: str, grid: Grid, layout) -> List[Dict[str, Any]]:
    """Differences between steps with reuse and without it, for each number of passes, the weights being the same."""
    settings, numbers = CASES[name]
    built = {
        reuse: build(Case("", {**settings, "feedback.prefix_reuse": reuse}), grid, layout) for reuse in (False, True)
    }
    counts = {reuse: RowCount(one.stage) for reuse, one in built.items()}
    found = []
    for passes in numbers:
        batches, recipe = batches_of(name, passes, layout), recipe_of(name, built[True])
        off, on = (take_step(built[reuse], recipe, batches, passes, counts[reuse]) for reuse in (False, True))
        found.append(
            {
                "passes": passes,
                "sums": relative(torch.tensor(on.sums), torch.tensor(off.sums)),
                "gradients": {key: relative(on.gradients[key], g) for key, g in off.gradients.items() if g.any()},
                "zeros": [key for key, g in off.gradients.items() if not g.any() and on.gradients[key].any()],
                "rows": on.rows / off.rows,
                "calls": on.calls / MICRO_BATCHES,
                "diagnostics": (off.diagnostics, on.diagnostics),
            }
        )
    return found


class OnHost(torch.Tensor):
    """A tensor in the CPU's memory while all others stand for a device's; so is what is computed from it."""


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a device: values that it reads, and shapes that depend on them."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self, host: Sequence[torch.Tensor]):
        super().__init__()
        self.found, self.host = [], {tensor.data_ptr() for tensor in host}

    def of_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stands for one on a device."""
        return not isinstance(tensor, OnHost) and tensor.data_ptr() not in self.host

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """See TorchDispatchMode."""
        name = function.overloadpacket.__name__
        indexes = name == "index" or (name.startswith("index_put") and args[2].numel() > 1)  # one value: no shape
        chosen = [x for x in args[1] if x is not None] if indexes else []
        waits = name in self.WAITING or any(index.dtype == torch.bool for index in chosen)
        if waits and self.of_device(args[0]):
            self.found.append(name)
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        """Count Tensor.tolist too, which no dispatch tells of; the CPU's generator is the host's."""
        self.plain = torch.Tensor.tolist, torch.get_rng_state
        torch.Tensor.tolist = lambda tensor: self._tolist(tensor)
        torch.get_rng_state = lambda: self.plain[1]().as_subclass(OnHost)
        return super().__enter__()

    def _tolist(self, tensor: torch.Tensor) -> list:
        if self.of_device(tensor):
            self.found.append("tolist")
        return self.plain[0](tensor)

    def __exit__(self, *error):
        """Count no more."""
        torch.Tensor.tolist, torch.get_rng_state = self.plain
        return super().__exit__(*error)


def host_reads(name: str, grid: Grid, layout: Layout) -> List[str]:
    """Reads in the second step of a case, from its micro-batches to the updated weights, with three passes."""
    built = build(Case("", CASES[name][0]), grid, layout)
    for _ in range(2):
        batches = batches_of(name, 3, layout)
        for batch in batches:
            region = None if batch.feedback_region is None else batch.feedback_region.as_subclass(OnHost)
            starts, numbers = batch.document_starts.as_subclass(OnHost), batch.sample_ids.as_subclass(OnHost)
            batch.on_host = MicroBatch(None, None, None, starts.clone(), numbers.clone(), region)
        states = built.optimizer.megatron.optimizer.state.values()
        with HostReads([state["step"] for state in states]) as reads:  # Adam's counts are the host's on any machine
            built.optimizer.zero_grad()
            built.optimizer.step(run_passes(built.stage, batches, 3, recipe_of(name, built)), True, False)
    return reads.found


def measure(rank: int, world_size: int, grid: Grid) -> Dict[str, List[Dict[str, Any]]]:
    """`compare` for every case; one launch runs all cases of a layout."""
    layout = start(grid)
    found = {name: compare(name, grid, layout) for name in CASES}
    reads = {name: host_reads(name, grid, layout) for name in ("random", "packed documents", "prompts", "some empty")}
    return {**found, "host reads": reads}
