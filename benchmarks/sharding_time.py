"""Step time of every sharding of the optimizer against none, with two data-parallel ranks (a report, no bars).

    OMP_NUM_THREADS=1 python benchmarks/sharding_time.py            (about 11 minutes on 2 idle cores)

Every model takes the same step (K = 2) in turn within one pair of processes; times are those of rank 0, whose
collectives wait for rank 1. `none / none` is the same model against itself: what is noise.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict, List, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch.distributed as dist  # noqa: E402
from hf_unrolled_baseline import Shape  # noqa: E402
from pairs import PairResult, format_table, measure, number_of_pairs, to_json  # noqa: E402
from step_time import build_config, random_batches  # noqa: E402

from megatron_fbt.config.memory_report import SHARDINGS  # noqa: E402
from megatron_fbt.core.parallel import Layout, initialize_parallel  # noqa: E402
from megatron_fbt.core.schedule import Recipe, run_passes  # noqa: E402
from megatron_fbt.core.stage import FBTStage  # noqa: E402
from megatron_fbt.data.batch import MicroBatch  # noqa: E402
from megatron_fbt.training.build_optimizer import build_optimizer  # noqa: E402

RANKS, PASSES, MICRO_BATCHES = 2, 2, 2


def build_step(sharding: str, shape: Shape, layout: Layout, batches: List[MicroBatch]) -> Callable[[], object]:
    """One whole step under a sharding."""
    config = build_config(shape)
    config.optimizer.sharding, config.training.micro_batch_size = sharding, shape.micro_batch_size
    config.training.global_batch_size = shape.micro_batch_size * MICRO_BATCHES * RANKS
    stage = FBTStage(config, layout, shape.vocab_size, shape.vocab_size)
    optimizer = build_optimizer(config, stage, layout)
    recipe = Recipe(config.feedback, config.run.seed, training=True)

    def step() -> object:
        optimizer.zero_grad()
        totals = run_passes(stage, batches, PASSES, recipe, through=optimizer.through)
        return optimizer.step(totals, fusion_active=True, stop_requested=False)

    return step


def compare(shape: Shape, rounds: int) -> Dict[str, PairResult]:
    """Time every sharding; called on both ranks."""
    config = build_config(shape)
    layout = initialize_parallel(config.parallel, config.run.seed)
    batches = random_batches(shape, MICRO_BATCHES)
    steps = [build_step(sharding, shape, layout, batches) for sharding in SHARDINGS]
    plain, *others, again = measure(rounds, *steps, steps[0])
    names = [f"{sharding} / none" for sharding in (*SHARDINGS[1:], "none")]
    return {name: PairResult.from_durations(times, plain) for name, times in zip(names, [*others, again], strict=True)}


def main(argv: Sequence[str]) -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=number_of_pairs, default=5, help="default: 5")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds: shows that the script runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        return subprocess.call([*command, __file__, *argv])
    quick = Shape(hidden_size=32, num_layers=2, ffn_hidden_size=64, sequence_length=32, vocab_size=64)
    shape = quick if args.quick else Shape()
    results = compare(shape, 2 if args.quick else args.rounds)
    if dist.get_rank() == 0:
        print(to_json(results) if args.json else format_table(results))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
