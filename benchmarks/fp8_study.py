"""Does the feedback loop stay a contraction in FP8? Training losses, and passes far beyond the trained ones.

A tiny model is trained in bf16 and in emulated FP8 (e4m3 and hybrid), all from the same weights on the same batches;
then the map from pass to pass is iterated, and each pass's loss and relative update are printed. Any machine will do.

    OMP_NUM_THREADS=1 python benchmarks/fp8_study.py --steps 300
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from gpu_check import Run, configuration  # noqa: E402
from pairs import whole_number  # noqa: E402

from megatron_fbt.config.pretrain import PretrainConfig  # noqa: E402
from megatron_fbt.core.parallel import initialize_parallel, shut_down_parallel  # noqa: E402

FORMATS = {
    "bf16": {},
    "e4m3": {"precision__fp8": "e4m3", "precision__fp8_emulated": True},
    "hybrid": {"precision__fp8": "hybrid", "precision__fp8_emulated": True},
    "hybrid, fusion and head too": {
        "precision__fp8": "hybrid",
        "precision__fp8_emulated": True,
        "precision__fp8_fusion": True,
        "precision__fp8_head": True,
    },
}
SHOWN = (1, 2, 3, 5, 10, 30, 60)
MODEL = {"data__sequence_length": 64, "model__vocab_size": 128, "optimizer__lr": 3e-3}
"""Small enough that some hundred steps make the map a contraction in bf16."""


@torch.no_grad()
def iterate(run: Run, passes: int) -> List[Tuple[float, float]]:
    """Loss and |h^k - h^(k-1)| / |h^k| over positions t >= k of pass k, for rows that training has not seen."""
    previous, found = None, []
    for k, states in enumerate(run.top_states(passes)):
        loss = run.stage.losses(states, run.unseen.labels).mean().item()
        still_open = states[k:].float()
        moved = previous is not None and len(still_open) > 0
        update = (still_open - previous[k:].float()).norm() / still_open.norm() if moved else float("nan")
        found.append((loss, float(update)))
        previous = states
    return found


def main() -> None:
    """Train and iterate in every format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = "of training; a third has 2 passes, a third 3"
    parser.add_argument("--steps", type=functools.partial(whole_number, low=1), default=300, help=steps)
    parser.add_argument("--passes", type=int, default=60, help="that are iterated, at most the row's 64")
    options = parser.parse_args()
    layout = initialize_parallel(PretrainConfig().parallel, seed=1)
    for name, fields in FORMATS.items():
        run = Run(configuration(True, **MODEL, **fields), layout)
        losses = [run.train(step, 1 + step % 3)[0] for step in range(options.steps)]
        every = max(1, options.steps // 6)
        print(f"{name}: training loss of pass 1 " + ", ".join(f"{loss:.4f}" for loss in losses[every - 1 :: every]))
        series = iterate(run, options.passes)
        for k in (k for k in SHOWN if k <= options.passes):
            print(f"  pass {k:>3}: loss {series[k - 1][0]:.4f}, relative update {series[k - 1][1]:.2e}", flush=True)
    shut_down_parallel(layout)


if __name__ == "__main__":
    main()
