"""Which FP8 context every product runs in, with Transformer Engine's context, layers and checkpoint replaced.

The stand-ins keep to what Transformer Engine documents: a context that is entered for each layer, layers that quantise
their weight when `is_first_microbatch` is set, and a checkpoint that enters the forward's context again.
"""

import contextlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Dict, List, Tuple

import torch
import torch.utils.checkpoint
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine as extension
from megatron.core.transformer import multi_token_prediction  # noqa: F401

from megatron_fbt.core.schedule import run_passes
from tests.distributed.engine import replace_engine
from tests.distributed.model_case import Case, Grid, build, global_batch, start

MICRO_BATCHES = 2


@dataclass(frozen=True)
class Entry:
    """One entered context: recipe and layer (-1 = all)."""

    recipe: str
    layer: int


class Recorder:
    """What happens: entered contexts, and products with the context they run in."""

    def __init__(self):
        self.active: List[Entry] = []
        self.entered: List[Tuple[Entry, bool]] = []
        """With whether it was in a recomputation."""
        self.products: List[Tuple[str, Any, bool, bool]] = []
        """Layer, innermost context, whether it was recomputed, whether its weight was quantised."""
        self.recomputing = False

    @contextlib.contextmanager
    def context(self, entry: Entry):
        """Stands in for fp8_autocast."""
        self.entered.append((entry, self.recomputing))
        self.active.append(entry)
        try:
            yield
        finally:
            self.active.pop()

    def get_fp8_context(self, config, layer_no=-1, is_init=False):
        """Stands in for Megatron-Core's function, whose rule for the first and last layers it keeps."""
        last = config.num_layers - config.num_layers_at_end_in_bf16
        if config.first_last_layers_bf16 and layer_no >= 0:
            if not config.num_layers_at_start_in_bf16 <= layer_no < last:
                return contextlib.nullcontext()
        return self.context(Entry(config.fp8_recipe, layer_no))

    def checkpoint(self, function, *args, use_reentrant=True, get_rng_state_tracker=None, **kwargs):
        """Stands in for Transformer Engine's checkpoint."""
        assert not use_reentrant and get_rng_state_tracker is not None
        inside, calls = list(self.active), []

        def run(*run_args, **run_kwargs):
            calls.append(None)
            if len(calls) == 1:
                return function(*run_args, **run_kwargs)
            with contextlib.ExitStack() as stack:
                stack.callback(setattr, self, "recomputing", False)
                self.recomputing = True
                for entry in inside:
                    stack.enter_context(self.context(entry))
                return function(*run_args, **run_kwargs)

        return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, **kwargs)

    def product(self, module) -> None:
        """Note a product of a layer that behaves as Megatron-Core's layers over Transformer Engine's do."""
        context = self.active[-1] if self.active else None
        self.products.append((module.place, context, self.recomputing, module.is_first_microbatch))
        module.is_first_microbatch = False

    def layers(self) -> Tuple[type, type]:
        """Column- and row-parallel layers."""
        recorder = self

        class Column(tensor_parallel.ColumnParallelLinear):
            """Notes its products."""

            is_first_microbatch, place = True, ""

            def forward(self, *args, **kwargs):
                """See above."""
                recorder.product(self)
                return super().forward(*args, **kwargs)

        class Row(tensor_parallel.RowParallelLinear):
            """Notes its products."""

            is_first_microbatch, place = True, ""

            def forward(self, *args, **kwargs):
                """See above."""
                recorder.product(self)
                return super().forward(*args, **kwargs)

        return Column, Row


def install(recorder: Recorder) -> None:
    """Replace what needs a GPU, in this process."""
    column, row = recorder.layers()
    replace_engine(column, row, recorder.get_fp8_context)
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.distributed"):
        sys.modules[name] = ModuleType(name)
    sys.modules["transformer_engine.pytorch.distributed"].checkpoint = recorder.checkpoint
    extension.TEColumnParallelLinear = lambda *args, skip_bias_add, is_expert, **kwargs: column(*args, **kwargs)


@dataclass
class Seen:
    """Of one step on one rank."""

    entered: List[Tuple[Entry, bool]]
    products: List[Tuple[str, Any, bool, bool]]


def record(rank: int, world_size: int, grid: Grid, cases: List[Case]) -> Dict[Tuple[str, int], Seen]:
    """Two training steps, then a validation, of each case and number of passes; the last two are returned."""
    recorder = Recorder()
    layout = start(grid)
    install(recorder)
    found = {}
    for case in cases:
        case.overrides.update({"model.num_layers": 4, "precision.fp8": "hybrid", "precision.dtype": "bf16"})
        built = build(case, grid, layout)
        for name, module in built.stage.named_modules():
            if hasattr(module, "is_first_microbatch"):
                module.place = name.replace("layers.", f"layers.{built.stage.decoder.layers[0].layer_number - 1}+", 1)
        for passes in case.passes:
            for forward_only in (False, False, True):
                recorder.entered.clear(), recorder.products.clear()
                built.optimizer.zero_grad()
                run_passes(built.stage, global_batch(0)[:MICRO_BATCHES], passes, built.recipe, forward_only)
                seen = Seen(list(recorder.entered), list(recorder.products))
                found[case.name, passes, forward_only] = seen
    return found
