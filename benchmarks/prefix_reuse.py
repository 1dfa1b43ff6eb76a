"""Steps of K = 2 and 3 passes against K = 1, in pairs: extra passes that compute their suffix alone, or in full.

    OMP_NUM_THREADS=1 python benchmarks/prefix_reuse.py            (about an hour on an idle core)
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/prefix_reuse.py --pipeline 2

Forward, backward and optimizer of the trainer; matrix products dominate. The plain prefixes of a step's n rows are
1 + floor((i + 1/2) T / n), i = 0 .. n - 1, in a shuffled order, the same on both sides; micro-batches of several rows
get those of about one length, as in training. Bars with micro-batches of one row: K = 2 / K = 1 <= 1.70,
K = 3 / K = 1 <= 2.45.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Callable, Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from hf_unrolled_baseline import Shape  # noqa: E402
from pairs import alternate, format_table, number_of_pairs, to_json  # noqa: E402
from step_time import build_config, random_batches  # noqa: E402

from megatron_fbt.core.parallel import Layout, initialize_parallel  # noqa: E402
from megatron_fbt.core.schedule import Recipe, run_passes  # noqa: E402
from megatron_fbt.core.stage import FBTStage  # noqa: E402
from megatron_fbt.data.batch import MicroBatch  # noqa: E402
from megatron_fbt.training.build_optimizer import build_optimizer  # noqa: E402

BARS = {"K=2 / K=1, reuse": 1.70, "K=3 / K=1, reuse": 2.45}


class Stratified(Recipe):
    """The training recipe with prefixes that are spread evenly over the rows instead of drawn."""

    def fused(self, batch: MicroBatch, pass_number: int) -> torch.Tensor:
        """[b, s] bool; rows have other prefixes in each pass."""
        length, rows = batch.document_starts.size(1), self.rows
        order = random.Random(pass_number).sample(range(rows), rows)
        plain = torch.tensor([1 + int((order[number % rows] + 0.5) * length / rows) for number in batch.sample_ids])
        return torch.arange(length) >= plain[:, None]

    rows = 8
    """n, rows of a step."""


def build_steps(args: argparse.Namespace, shape: Shape, layout: Layout) -> Dict[str, Callable[[], object]]:
    """Steps by name: K=1, and K=2 and K=3 with reuse and in full, over one model."""
    config = build_config(shape)
    config.parallel.pipeline_model_parallel_size = args.pipeline
    stage = FBTStage(config, layout, shape.vocab_size, shape.vocab_size)
    optimizer = build_optimizer(config, stage, layout)
    recipe = Stratified(config.feedback, config.run.seed, training=True)
    recipe.rows = args.rows
    batches = random_batches(shape, micro_batches=args.rows // shape.micro_batch_size)

    def step(passes: int, reuse: bool) -> object:
        stage.reuses_prefix = reuse
        optimizer.zero_grad()
        return optimizer.step(run_passes(stage, batches, passes, recipe), fusion_active=True, stop_requested=False)

    return {
        "K=1": lambda: step(1, False),
        **{
            f"K={passes}, {name}": (lambda passes=passes, reuse=reuse: step(passes, reuse))
            for passes in (2, 3)
            for name, reuse in (("reuse", True), ("in full", False))
        },
    }


def shape_of(args: argparse.Namespace) -> Shape:
    """D 512, 8 layers, T 1024, V 32k, or what the options say."""
    return Shape(
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        ffn_hidden_size=8 * args.hidden_size // 3 // 64 * 64,
        num_attention_heads=args.hidden_size // 64,
        num_query_groups=args.hidden_size // 64,
        sequence_length=args.sequence_length,
        vocab_size=args.vocab_size,
        micro_batch_size=args.micro_batch_size,
    )


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pairs", type=number_of_pairs, default=6, help="pairs in each comparison")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step, in micro-batches")
    parser.add_argument("--micro_batch_size", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1, help="stages, one process each")
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--num_layers", type=int, default=8)
    parser.add_argument("--sequence_length", type=int, default=1024)
    parser.add_argument("--vocab_size", type=int, default=32768)
    parser.add_argument("--full", action="store_true", help="extra passes in full as well, to compare with")
    parser.add_argument("--json", action="store_true", help="every ratio, as one JSON object")
    return parser.parse_args()


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    args = options()
    torch.set_num_threads(1)
    shape = shape_of(args)
    config = build_config(shape)
    config.parallel.pipeline_model_parallel_size = args.pipeline
    layout = initialize_parallel(config.parallel, seed=1)
    steps, results = build_steps(args, shape, layout), {}
    names: List[str] = [name for name in steps if name.endswith("reuse") or (args.full and name != "K=1")]
    for name in names:
        count, kind = name.split(", ")
        results[f"{count} / K=1, {kind}"] = alternate(steps[name], steps["K=1"], args.pairs)
    if not layout.is_first_stage:
        return 0
    print(to_json(results) if args.json else format_table(results), flush=True)
    missed = [name for name, bar in BARS.items() if results[name].median > bar] if args.micro_batch_size == 1 else []
    for name in missed:
        print(f"missed: {name} {results[name].median:.3f} > {BARS[name]}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
