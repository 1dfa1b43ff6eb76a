"""The loss over chunks of tokens against Megatron-Core's over whole logits: time in pairs, peak memory.

    OMP_NUM_THREADS=1 python benchmarks/chunked_loss.py            (about 10 minutes on an idle core)

Forward and backward of the output head and its loss, 4,096 tokens, 131,072 entries. Bars: peak memory above weights and
gradients <= 0.25 of whole logits; time <= 1.10, and <= 1.40 where the logits of a chunk are computed twice.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from pairs import alternate_with_noise, format_table, number_of_pairs, to_json  # noqa: E402

from megatron_fbt.config.pretrain import PretrainConfig  # noqa: E402
from megatron_fbt.core.grad_sync import wrap_for_data_parallel  # noqa: E402
from megatron_fbt.core.parallel import Layout, initialize_parallel  # noqa: E402
from megatron_fbt.core.stage import FBTStage  # noqa: E402

TIME_BARS = {"once / whole": 1.10, "twice / whole": 1.40}
MEMORY_BAR = 0.25
Step = Callable[[], object]


def build_stage(args: argparse.Namespace, layout: Layout, chunked: bool, buffers: bool) -> FBTStage:
    """A model of one small layer under a large head."""
    config = PretrainConfig()
    config.model.num_layers, config.model.hidden_size, config.model.ffn_hidden_size = 1, args.hidden_size, 64
    config.model.num_attention_heads = config.model.num_query_groups = 4
    config.precision.dtype, config.memory.chunked_loss = "fp32", chunked
    config.memory.loss_chunk_mib = args.loss_chunk_mib
    stage = FBTStage(config, layout, args.vocab_size, args.vocab_size)
    if buffers:
        wrap_for_data_parallel(stage, "none")
    return stage


def build_step(args: argparse.Namespace, layout: Layout, way: str) -> Step:
    """Forward and backward: whole (Megatron-Core's loss), once (chunks, gradient buffers), twice (chunks, none)."""
    stage = build_stage(args, layout, way != "whole", way != "twice")
    weight = stage.head_weight()
    if way == "twice":
        weight.grad = torch.ones_like(weight)
    else:
        weight.main_grad.fill_(1.0)  # so that its memory is there
    states = torch.randn(args.tokens, 1, args.hidden_size, requires_grad=True)
    labels = torch.randint(args.vocab_size, (1, args.tokens))
    weights = torch.ones(args.tokens, 1)

    def step() -> None:
        states.grad = None
        stage.objective(states, labels, weights, None)[0].backward()

    return step


def memory(field: str) -> float:
    """MiB of a field of /proc/self/status (VmRSS now, VmHWM at its peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peak(step: Step) -> float:
    """MiB at the peak of two steps above what is there before them: weights and gradients, which are filled first."""
    Path("/proc/self/clear_refs").write_text("5")  # lets VmHWM begin again
    before = memory("VmRSS")
    for _ in range(2):
        step()
    return memory("VmHWM") - before


def peaks(arguments: list) -> Dict[str, float]:
    """Peak of each way, in a process of its own."""
    found = {}
    for way in ("whole", "once", "twice"):
        command = [sys.executable, __file__, *arguments, "--peak_of", way]
        found[way] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return found


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pairs", type=number_of_pairs, default=8, help="pairs in each comparison")
    parser.add_argument("--vocab_size", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--loss_chunk_mib", type=float, default=256.0, help="memory.loss_chunk_mib")
    parser.add_argument("--json", action="store_true", help="every ratio, as one JSON object")
    parser.add_argument("--peak_of", choices=("whole", "once", "twice"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    layout = initialize_parallel(PretrainConfig().parallel, seed=1)
    if args.peak_of:
        print(peak(build_step(args, layout, args.peak_of)))
        return 0
    found = peaks(sys.argv[1:])
    whole, results = build_step(args, layout, "whole"), {}
    for way in ("once", "twice"):
        name = f"{way} / whole"
        results[name], results[f"{name}: noise"] = alternate_with_noise(
            build_step(args, layout, way), whole, args.pairs
        )
    print(to_json(results) if args.json else format_table(results), flush=True)
    missed = [
        f"{name} {results[name].median:.3f} > {bar}" for name, bar in TIME_BARS.items() if results[name].median > bar
    ]
    for way in ("once", "twice"):
        share = found[way] / max(found["whole"], 1)
        print(f"peak memory, {way}: {found[way]:6.0f} MiB, whole: {found['whole']:6.0f} MiB, ratio {share:.3f}")
        missed += [f"peak memory of {way} {share:.3f} > {MEMORY_BAR}"] if share > MEMORY_BAR else []
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
