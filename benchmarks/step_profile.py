"""Where the time of a training step goes: shares of its kinds of work, by PyTorch's profiler.

    OMP_NUM_THREADS=1 python benchmarks/step_profile.py            (a minute on an idle core)

A step is forward, backward and optimizer of the trainer. What is neither matrix product nor attention is overhead that
may shrink. Times are those of the processor, so that other users of the machine disturb little; the profiler's own work
counts as Python.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from hf_unrolled_baseline import Shape  # noqa: E402
from step_time import build_config, random_batches  # noqa: E402
from torch.autograd.profiler_util import FunctionEvent  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from megatron_fbt.core.parallel import initialize_parallel  # noqa: E402
from megatron_fbt.core.schedule import Recipe, run_passes  # noqa: E402
from megatron_fbt.core.stage import FBTStage  # noqa: E402
from megatron_fbt.training.build_optimizer import build_optimizer  # noqa: E402

MATRIX, LOSS, NORM, COPY, READ = (
    "matrix products, attention",
    "loss",
    "norms, activations",
    "copies, casts",
    "host reads",
)
OPTIMIZER, OTHER, PYTHON = "optimizer", "other operators", "Python"
KINDS = (MATRIX, LOSS, NORM, COPY, READ, OPTIMIZER, OTHER, PYTHON)
BY_NAME = {
    MATRIX: ("mm", "addmm", "addmm_", "bmm", "baddbmm"),
    NORM: (
        "rms_norm",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "silu",
        "silu_backward",
        "sigmoid",
        "sigmoid_backward",
    ),
    COPY: ("copy_", "_to_copy", "clone", "contiguous", "cat", "fill_", "zero_", "repeat_interleave", "constant_pad_nd"),
    READ: ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"),
}
KIND_OF = {f"aten::{name}": kind for kind, names in BY_NAME.items() for name in names}
BACKWARD = "autograd::engine::evaluate_function: "


def kind_by_name(name: str) -> Optional[str]:
    """What an operator's name says of it."""
    return MATRIX if "scaled_dot_product" in name else KIND_OF.get(name)


def kind_by_place(name: str) -> Optional[str]:
    """What the name of something that an operator is called from says of it."""
    if name in (LOSS, OPTIMIZER) or "ChunkedLoss" in name or "CrossEntropy" in name:
        return OPTIMIZER if name == OPTIMIZER else LOSS
    return NORM if kind_by_name(name) == NORM else None


def callers(event: FunctionEvent) -> Iterable[FunctionEvent]:
    """The event, and what it is called from."""
    while event is not None:
        yield event
        event = event.cpu_parent


def kind_of(event: FunctionEvent, forward: Dict[int, str]) -> str:
    """The kind of the event's own time.

    Args:
        event: an operator or what calls operators.
        forward: kinds by the sequence number that an operator shares with its node in the backward.
    """
    named = kind_by_name(event.name)
    if named == MATRIX:
        return MATRIX
    for caller in callers(event):
        kind = kind_by_place(caller.name)
        if kind is None and caller.name.startswith(BACKWARD):
            kind = forward.get(caller.sequence_nr)
        if kind is not None:
            return kind
    return named or (OTHER if event.name.startswith("aten::") else PYTHON)


def forward_kinds(events: List[FunctionEvent]) -> Dict[int, str]:
    """Kinds of the forward's operators that run within a loss or a norm, by sequence number."""
    found = {}
    for event in events:
        if event.sequence_nr < 0 or any(caller.name.startswith(BACKWARD) for caller in callers(event)):
            continue
        kinds = [kind for caller in callers(event) if (kind := kind_by_place(caller.name)) is not None]
        if kinds:
            found[event.sequence_nr] = kinds[0]
    return found


def profiled(step: Callable[[], object]) -> Tuple[Dict[str, float], Dict[str, float]]:
    """Seconds of one step by kind, and those of the operators that are no matrix products by name."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.process_time()
        step()
        elapsed = time.process_time() - began
    events = [event for event in profiler.events() if event.device_type.name == "CPU"]
    forward, seconds, names = forward_kinds(events), dict.fromkeys(KINDS, 0.0), {}
    for event in events:
        kind, own = kind_of(event, forward), event.self_cpu_time_total / 1e6
        seconds[kind] += own
        if kind != MATRIX:
            names[event.name] = names.get(event.name, 0.0) + own
    seconds[PYTHON] += max(0.0, elapsed - sum(seconds.values()))
    return seconds, names


def build_step(shape: Shape, passes: int, micro_batches: int) -> Callable[[], object]:
    """A step of the trainer, with its loss and its optimizer named for the profiler."""
    config = build_config(shape)
    layout = initialize_parallel(config.parallel, seed=1)
    stage = FBTStage(config, layout, shape.vocab_size, shape.vocab_size)
    optimizer = build_optimizer(config, stage, layout)
    recipe, batches = Recipe(config.feedback, config.run.seed, training=True), random_batches(shape, micro_batches)
    objective = stage.objective

    def named_objective(*arguments):
        with record_function(LOSS):
            return objective(*arguments)

    def step() -> None:
        stage.objective = named_objective
        with record_function(OPTIMIZER):
            optimizer.zero_grad()
        totals = run_passes(stage, batches, passes, recipe, on_last_backward=optimizer.on_last_backward)
        with record_function(OPTIMIZER):
            optimizer.step(totals, fusion_active=True, stop_requested=False)

    return step


def measure(shape: Shape, passes: int, micro_batches: int, steps: int) -> Dict[str, object]:
    """Processor seconds of a step without the profiler, and shares, medians of some steps."""
    step, plain, shares, names = build_step(shape, passes, micro_batches), [], [], []
    step()
    for _ in range(steps):
        began = time.process_time()
        step()
        plain.append(time.process_time() - began)
        seconds, by_name = profiled(step)
        total = sum(seconds.values())
        shares.append({kind: value / total for kind, value in seconds.items()})
        names.append({name: value / total for name, value in by_name.items()})
    middle = {kind: statistics.median(one[kind] for one in shares) for kind in KINDS}
    largest = sorted(names[-1].items(), key=lambda item: -item[1])[:12]
    return {"seconds": statistics.median(plain), "shares": middle, "largest": dict(largest)}


def format_report(found: Dict[str, object]) -> str:
    """The table of shares, and the largest operators that are no matrix products."""
    lines = [f"{found['seconds']:.3f} s of the processor a step"]
    lines += [f"{share:7.1%}  {kind}" for kind, share in found["shares"].items()]
    lines += ["", "largest that are neither matrix products nor attention:"]
    return "\n".join(lines + [f"{share:7.2%}  {name}" for name, share in found["largest"].items()])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--passes", type=int, default=2, help="K")
    parser.add_argument("--micro_batches", type=int, default=4, help="of one row each")
    parser.add_argument("--steps", type=int, default=3, help="steps that are profiled")
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that the script runs")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    small = Shape(hidden_size=64, num_layers=2, ffn_hidden_size=128, sequence_length=64, vocab_size=256)
    large = Shape(
        hidden_size=512,
        num_layers=4,
        ffn_hidden_size=1344,
        num_attention_heads=8,
        num_query_groups=8,
        sequence_length=512,
        vocab_size=8192,
    )
    found = measure(small if args.small else large, args.passes, args.micro_batches, args.steps)
    print(json.dumps(found, indent=2) if args.json else format_report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
