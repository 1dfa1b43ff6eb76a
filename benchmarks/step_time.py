"""Whole optimizer steps, paired: the trainer against stock Megatron-Core and a hand-written unroll, K passes against 1.

    OMP_NUM_THREADS=1 python benchmarks/step_time.py            (about 15 minutes on an idle core)

Every comparison alternates its two sides; beside it stands the same side against itself, from the same rounds. Bars:
K = 1 / stock GPTModel <= 1.05, K = 2 / K = 1 <= 2.10, K = 3 / K = 1 <= 3.20, K = 2 / hand-written <= 1.03.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from hf_unrolled_baseline import Shape  # noqa: E402
from hf_unrolled_baseline import build_step as build_unrolled_step  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining  # noqa: E402
from pairs import PairResult, alternate_with_noise, format_table, number_of_pairs, to_json  # noqa: E402

from megatron_fbt.config.pretrain import PretrainConfig  # noqa: E402
from megatron_fbt.core.cpu import cuda_type_names  # noqa: E402
from megatron_fbt.core.grad_sync import build_megatron_optimizer, reduce_gradients, wrap_for_data_parallel  # noqa: E402
from megatron_fbt.core.parallel import Layout, initialize_parallel  # noqa: E402
from megatron_fbt.core.schedule import Recipe, run_passes  # noqa: E402
from megatron_fbt.core.specs import block_spec, transformer_config  # noqa: E402
from megatron_fbt.core.stage import FBTStage  # noqa: E402
from megatron_fbt.data.batch import MicroBatch  # noqa: E402
from megatron_fbt.training.build_optimizer import build_optimizer  # noqa: E402

Step = Callable[[], object]
BARS = {"K=1 / stock": 1.05, "K=2 / K=1": 2.10, "K=3 / K=1": 3.20, "K=2 / hand-written": 1.03}


def build_config(shape: Shape) -> PretrainConfig:
    """The trainer's configuration of the benchmark's model."""
    config = PretrainConfig()
    model = config.model
    model.hidden_size, model.num_layers, model.ffn_hidden_size = (
        shape.hidden_size,
        shape.num_layers,
        shape.ffn_hidden_size,
    )
    model.num_attention_heads, model.num_query_groups = shape.num_attention_heads, shape.num_query_groups
    config.data.sequence_length = shape.sequence_length
    config.precision.dtype = "fp32"
    return config


def random_batches(shape: Shape, micro_batches: int) -> List[MicroBatch]:
    """One document a row."""
    size = (shape.micro_batch_size, shape.sequence_length)
    starts = torch.zeros(size, dtype=torch.bool)
    starts[:, 0] = True
    return [
        MicroBatch(
            torch.randint(shape.vocab_size, size),
            torch.randint(shape.vocab_size, size),
            torch.ones(size),
            starts,
            torch.arange(shape.micro_batch_size) + number * shape.micro_batch_size,
        )
        for number in range(micro_batches)
    ]


def build_fbt_steps(shape: Shape, layout: Layout, batches: List[MicroBatch]) -> Dict[int, Step]:
    """The trainer's step with K = 1, 2, 3 passes, over one model."""
    config = build_config(shape)
    stage = FBTStage(config, layout, shape.vocab_size, shape.vocab_size)
    optimizer = build_optimizer(config, stage, layout)
    recipe = Recipe(config.feedback, config.run.seed, training=True)

    def step(passes: int) -> object:
        optimizer.zero_grad()
        totals = run_passes(stage, batches, passes, recipe)
        return optimizer.step(totals, fusion_active=True, stop_requested=False)

    return {passes: (lambda passes=passes: step(passes)) for passes in (1, 2, 3)}


def build_stock_step(shape: Shape, batches: List[MicroBatch]) -> Step:
    """Megatron-Core's GPTModel with the same layers, its own loss, schedule and optimizer step."""
    config = build_config(shape)
    mcore = transformer_config(config)
    mcore.calculate_per_token_loss = False
    layers = block_spec(mcore, config)
    model = GPTModel(
        mcore,
        layers,
        shape.vocab_size,
        shape.sequence_length,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    model = wrap_for_data_parallel(model, "none")
    optimizer = build_megatron_optimizer(config.optimizer, model)

    def forward_step(iterator, chunk):
        batch = next(iterator)
        losses = chunk(batch.tokens, None, None, labels=batch.labels)
        return losses, lambda values: (values.mean(), {})

    def step() -> object:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=shape.sequence_length,
            micro_batch_size=shape.micro_batch_size,
        )
        reduce_gradients(model)
        with cuda_type_names():
            return optimizer.step()

    return step


def compare(shape: Shape, pairs: int, only: List[str]) -> Dict[str, PairResult]:
    """Run the comparisons; each with its noise line."""
    layout = initialize_parallel(build_config(shape).parallel, seed=1)
    batches = random_batches(shape, micro_batches=1)
    fbt = build_fbt_steps(shape, layout, batches)
    sides = {
        "K=1 / stock": (fbt[1], lambda: build_stock_step(shape, batches)),
        "K=2 / K=1": (fbt[2], lambda: fbt[1]),
        "K=3 / K=1": (fbt[3], lambda: fbt[1]),
        "K=2 / hand-written": (fbt[2], lambda: build_unrolled_step(shape, 2, micro_batches=1)),
    }
    results = {}
    for name, (a, make_b) in sides.items():
        if only and name not in only:
            continue
        print(f"{name}: {pairs} pairs …", file=sys.stderr, flush=True)
        results[name], results[f"{name}: noise"] = alternate_with_noise(a, make_b(), pairs)
    return results


def resident(field: str) -> float:
    """MiB of a field of /proc/self/status (VmRSS now, VmHWM at its peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peak_memory(shape: Shape, passes: int, steps: int = 2) -> float:
    """MiB at the peak of some steps of K passes above the built model: Adam's states, activations, logits."""
    layout = initialize_parallel(build_config(shape).parallel, seed=1)
    step = build_fbt_steps(shape, layout, random_batches(shape, micro_batches=1))[passes]
    before = resident("VmRSS")
    for _ in range(steps):
        step()
    return resident("VmHWM") - before


def memory_table(arguments: List[str]) -> str:
    """Peak memory above the built model, Adam's states included, for each K, each in a process of its own."""
    found = {}
    for passes in (1, 2, 3):
        command = [sys.executable, __file__, *arguments, "--peak_memory_of", str(passes)]
        found[passes] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return "\n".join(f"peak memory, K={k}: {v:8.0f} MiB  ({v / max(found[1], 1):.2f} x K=1)" for k, v in found.items())


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pairs", type=number_of_pairs, default=20, help="pairs in each comparison")
    parser.add_argument("--only", action="append", default=[], choices=list(BARS), help="run this comparison only")
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that the script runs, not how fast")
    parser.add_argument("--json", action="store_true", help="every ratio, as one JSON object")
    parser.add_argument("--peak_memory_of", type=int, choices=(1, 2, 3), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    small = Shape(hidden_size=64, num_layers=2, ffn_hidden_size=128, sequence_length=64, vocab_size=256)
    shape = small if args.small else Shape()
    if args.peak_memory_of:
        print(peak_memory(shape, args.peak_memory_of))
        return 0
    results = compare(shape, args.pairs, args.only)
    print(to_json(results) if args.json else format_table(results), flush=True)
    if not args.json:
        print(memory_table(["--small"] if args.small else []))
    missed = [name for name, bar in BARS.items() if name in results and results[name].median > bar]
    for name in missed:
        print(f"missed: {name} {results[name].median:.3f} > {BARS[name]}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
