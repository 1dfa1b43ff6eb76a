"""What K = 2 and 3 passes hold against K = 1, with recompute chosen from a budget, and the time that it costs.

    OMP_NUM_THREADS=1 python benchmarks/memory_of_passes.py            (about half an hour on an idle core)

Every tensor that forward and backward of a micro-batch of one row make is counted: exact, and the same in each run. The
peak stands above weights, gradients and optimizer; the total includes them. The loss is chunked on both sides, K = 1
computes nothing again. Prefixes are a quarter of the row, and one position. The automatic policy is that of a budget of
the bar times the peak of K = 1, or the smallest there is; the curve has other budgets, and beside the memory the time,
in pairs with K = 1. Bars: peak K = 2 / K = 1 <= 1.25, K = 3 / K = 1 <= 1.40.
"""

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Dict, List, Optional, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from pairs import alternate, number_of_pairs  # noqa: E402
from prefix_reuse import shape_of  # noqa: E402
from step_time import build_config, random_batches  # noqa: E402
from tensor_bytes import TensorBytes  # noqa: E402

from megatron_fbt.config.feedback import PassPhase  # noqa: E402
from megatron_fbt.config.memory import RecomputePolicy  # noqa: E402
from megatron_fbt.config.memory_report import largest_rank  # noqa: E402
from megatron_fbt.config.recompute_choice import choose, recompute_options  # noqa: E402
from megatron_fbt.core.parallel import initialize_parallel  # noqa: E402
from megatron_fbt.core.schedule import Recipe, run_passes  # noqa: E402
from megatron_fbt.core.stage import FBTStage  # noqa: E402
from megatron_fbt.data.batch import MicroBatch  # noqa: E402
from megatron_fbt.errors import ConfigError  # noqa: E402
from megatron_fbt.training.build_optimizer import build_optimizer  # noqa: E402

BARS = {2: 1.25, 3: 1.40}
BUDGETS = (1.0, 1.1, 1.25, 1.4, 2.0, 3.0)
"""Times the peak of K = 1."""
TIMELINE = 40
"""Points of a step's timeline."""


class FixedPrefix(Recipe):
    """The training recipe with one prefix for all rows and passes."""

    def fused(self, batch: MicroBatch, pass_number: int) -> torch.Tensor:
        """[b, s] bool."""
        starts = batch.document_starts
        return (torch.arange(starts.size(1), device=starts.device) >= self.plain).expand_as(starts)

    plain = 1
    """Positions of the prefix."""


class Model:
    """The trainer's model and optimizer, of which forward and backward of a row are counted and timed."""

    def __init__(self, args: argparse.Namespace):
        shape = shape_of(args)
        self.config, self.vocab_size = build_config(shape), shape.vocab_size
        self.config.model.vocab_size = shape.vocab_size
        layout = initialize_parallel(self.config.parallel, seed=1)
        self.stage = FBTStage(self.config, layout, shape.vocab_size, shape.vocab_size)
        self.optimizer = build_optimizer(self.config, self.stage, layout)
        self.batches = random_batches(shape, micro_batches=1)
        self.recipe = FixedPrefix(self.config.feedback, self.config.run.seed, training=True)
        self.pairs = 0 if args.memory_only else args.pairs
        self.state = largest_rank(self.config, self.config.optimizer.sharding, 1, self.vocab_size).states

    def set(self, passes: int, policy: RecomputePolicy) -> None:
        """Recompute of the calls that follow."""
        self.config.feedback.schedule = [PassPhase(0.0, {passes: 1.0})]
        self.config.memory.recompute, self.config.memory.recompute_passes = vars(policy).values()

    def step(self, passes: int, policy: RecomputePolicy) -> None:
        """Forward and backward."""
        self.set(passes, policy)
        self.optimizer.zero_grad()
        run_passes(self.stage, self.batches, passes, self.recipe)

    def count(self, passes: int, policy: RecomputePolicy) -> Dict:
        """Peak and total in bytes, and the timeline, whose points are equal numbers of operators apart."""
        gc.collect()
        params = list(self.stage.parameters())
        with TensorBytes() as counted:
            counted.ignore(*params, *(param.main_grad for param in params))
            self.step(passes, policy)
        timeline, total = counted.timeline(TIMELINE), counted.peak + self.state
        return {"peak": counted.peak, "total": total, "left": counted.now, "timeline": timeline}

    def time(self, passes: int, policy: RecomputePolicy) -> Optional[float]:
        """Against K = 1 without recompute, the median of pairs; None = it is not asked for."""
        if self.pairs == 0:
            return None
        plain = RecomputePolicy()
        step, one = (lambda: self.step(passes, policy)), (lambda: self.step(1, plain))
        return alternate(step, one, self.pairs, warm_up=0).median

    def choice(self, passes: int, peak: float) -> Dict:
        """The policy for a budget of `peak` bytes above the state, and its estimate; the smallest if none fits."""
        self.set(passes, RecomputePolicy())
        options = recompute_options(self.config, {passes: 1.0}, 1, self.vocab_size)
        self.config.memory.budget_gib = (peak + self.state) / 2**30
        try:
            policy = choose(self.config.memory, options)
        except ConfigError:
            policy = min(options, key=lambda option: option.total).policy
        finally:
            self.config.memory.budget_gib = None
        (option,) = (option for option in options if option.policy == policy)
        return {"policy": policy, "estimate": option.total - self.state, "computed_again": option.repeated}


def measure(model: Model, prefix: int) -> Dict[str, object]:
    """{K: what each budget comes to} at one prefix; the entry of the bar is the automatic policy."""
    model.recipe.plain = prefix
    model.step(1, RecomputePolicy())
    one = model.count(1, RecomputePolicy())
    found: Dict[str, object] = {"K=1": one}
    for passes, bar in BARS.items():
        known, rows = {}, []
        for budget in sorted({*BUDGETS, bar}):
            choice = model.choice(passes, budget * one["peak"])
            policy = choice.pop("policy")
            if policy not in known:
                known[policy] = {**model.count(passes, policy), "time": model.time(passes, policy)}
            counted = known[policy]
            ratios = {f"{name}_ratio": counted[name] / one[name] for name in ("peak", "total")}
            rows.append({"budget": budget, "automatic": budget == bar, **vars(policy), **choice, **counted, **ratios})
        found[f"K={passes}"] = rows
    return found


def table(prefix: int, found: Dict) -> List[str]:
    """Lines for a person, in MiB."""
    one = found["K=1"]
    lines = [
        f"prefix {prefix}: K=1 peak {one['peak'] / 2**20:.0f}, total {one['total'] / 2**20:.0f} MiB",
        f"{'':4} {'budget':>6} {'recompute':<17} {'estimate':>8} {'peak':>6} {'ratio':>6} {'total':>6} {'ratio':>6} "
        f"{'time':>6} {'again':>6}",
    ]
    for passes in BARS:
        for row in found[f"K={passes}"]:
            policy = RecomputePolicy(row["recompute"], row["recompute_passes"])
            time = "-" if row["time"] is None else f"{row['time']:.3f}"
            lines.append(
                f"K={passes}{'*' if row['automatic'] else ' '} {row['budget']:6.2f} {str(policy):<17} "
                f"{row['estimate'] / 2**20:8.0f} {row['peak'] / 2**20:6.0f} {row['peak_ratio']:6.3f} "
                f"{row['total'] / 2**20:6.0f} {row['total_ratio']:6.3f} {time:>6} {row['computed_again']:6.1%}"
            )
            if row["automatic"]:
                lines.append("     timeline " + " ".join(f"{size / 2**20:.0f}" for size in row["timeline"]))
    return lines


def missed_bars(results: Dict[int, Dict]) -> List[str]:
    """What the automatic policies do not keep to."""
    return [
        f"prefix {prefix}, K={passes} / K=1: peak {row['peak_ratio']:.3f} > {bar}"
        for prefix, found in results.items()
        for passes, bar in BARS.items()
        for row in found[f"K={passes}"]
        if row["automatic"] and row["peak_ratio"] > bar
    ]


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pairs", type=number_of_pairs, default=2, help="pairs of each time")
    parser.add_argument("--memory_only", action="store_true", help="take no times")
    parser.add_argument("--prefix", type=int, action="append", help="positions, again for another; T/4 and 1 if absent")
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--num_layers", type=int, default=8)
    parser.add_argument("--sequence_length", type=int, default=1024)
    parser.add_argument("--vocab_size", type=int, default=32768)
    parser.add_argument("--json", action="store_true", help="all numbers, timelines included, as one JSON object")
    parser.set_defaults(micro_batch_size=1)
    return parser.parse_args()


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    args = options()
    torch.set_num_threads(1)
    model = Model(args)
    prefixes: Sequence[int] = args.prefix or (args.sequence_length // 4, 1)
    results = {}
    for prefix in prefixes:
        results[prefix] = measure(model, prefix)
        if not args.json:
            print("\n".join(table(prefix, results[prefix])), flush=True)
    missed = missed_bars(results)
    if args.json:
        print(json.dumps({"state": model.state, "prefixes": results, "missed": missed}, indent=2))
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
