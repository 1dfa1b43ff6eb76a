"""Saving and loading a checkpoint against plain writes and reads of as many bytes on the same disk.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_speed.py --folder /tmp/checkpoint_speed     (2 GB; some minutes)
    OMP_NUM_THREADS=1 python benchmarks/checkpoint_speed.py --quick                            (6 MB; some seconds)

A random model with full AdamW states goes through the code that runs use, in one process. Both sides of every
comparison are in one round, in an order that turns from round to round, and both end with fsync. Before a load and
before the plain read the files leave the page cache; before every write as many bytes are written and deleted, for
memory that the system has to find first costs more than the write. Training stands still for an asynchronous save
while it begins, while the next optimizer step waits for what is left of the copy after a forward and backward, and
while the files become visible. How much longer that forward and backward take beside the copy is told, too: both use
the processors here. Bars: an asynchronous save keeps training waiting for at most 15 % of a synchronous save's time;
saving and loading reach at least 0.6 of the plain throughput. Exit code 1: a bar is missed (not with --quick).
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hf_unrolled_baseline import Shape  # noqa: E402
from step_time import random_batches  # noqa: E402

from megatron_fbt.config.checkpoint import CheckpointConfig  # noqa: E402
from megatron_fbt.config.load import dump_yaml  # noqa: E402
from megatron_fbt.config.pretrain import PretrainConfig  # noqa: E402
from megatron_fbt.core.manifest import read_manifest, sync_path  # noqa: E402
from megatron_fbt.core.parallel import initialize_parallel, shut_down_parallel  # noqa: E402
from megatron_fbt.core.schedule import Recipe, run_passes  # noqa: E402
from megatron_fbt.core.stage import FBTStage  # noqa: E402
from megatron_fbt.training.build_optimizer import build_optimizer  # noqa: E402
from megatron_fbt.training.checkpoint import Checkpointer  # noqa: E402
from megatron_fbt.training.run_folder import TrainerState  # noqa: E402

BLOCK = 8 << 20
BARS = {"asynchronous / synchronous": ("at most", 0.15), "save": ("at least", 0.6), "load": ("at least", 0.6)}
VOCABULARY = 32_000
LAYERS = 9


class Subject:
    """A model with optimizer states, and the checkpoints of it.

    Args:
        folder: for the files.
        dtype: precision.dtype.
        quick: a model of 0.4 instead of 150 million parameters.
    """

    def __init__(self, folder: Path, dtype: str, quick: bool):
        self.folder, self.step = folder, 0
        self.steps: Dict[str, List[float]] = {"alone": [], "beside a save": []}
        """Seconds of forward and backward."""
        self.config = config = PretrainConfig()
        model = config.model
        model.num_layers, model.hidden_size, model.ffn_hidden_size = (2, 64, 256) if quick else (LAYERS, 1024, 2816)
        model.num_attention_heads = model.num_query_groups = 8
        model.vocab_size = 2048 if quick else VOCABULARY
        config.precision.dtype = dtype
        self.layout = initialize_parallel(config.parallel, seed=1)
        self.stage = FBTStage(config, self.layout, model.vocab_size, model.vocab_size)
        self.optimizer = build_optimizer(config, self.stage, self.layout)
        for param in self.stage.parameters():
            for values in self.optimizer.make_state(param, updates=1).values.values():
                values.uniform_()
        self.recipe = Recipe(config.feedback, config.run.seed, training=True)
        shape = Shape(vocab_size=model.vocab_size, sequence_length=4, micro_batch_size=1)
        self.batches = random_batches(shape, 1)
        self.checkpointer = Checkpointer(folder / "checkpoints", CheckpointConfig(), self.layout)

    @property
    def content(self) -> tuple:
        """What a save takes; each time of the next step."""
        self.step += 1
        state = TrainerState(step=self.step, updates=1, fusion_updates=1)
        return self.stage, self.optimizer, state, dump_yaml(self.config)

    @property
    def newest(self) -> Path:
        """The checkpoint written last."""
        return self.checkpointer.folder.final(self.step)

    def drop_older(self) -> None:
        """Free the space of all checkpoints but the newest."""
        for checkpoint in (self.folder / "checkpoints").glob("step_*"):
            if checkpoint != self.newest:
                shutil.rmtree(checkpoint)

    def settle(self) -> None:
        """Before every write: as many bytes have just been written and freed, so all find the same memory and disk."""
        target = self.folder / "before"
        write_plain(target, max(self.size, BLOCK))
        target.unlink()
        os.sync()

    @property
    def size(self) -> int:
        """Bytes of the newest checkpoint; 0 before the first."""
        return read_manifest(self.newest).size if self.newest.exists() else 0

    def save(self) -> float:
        """Write a checkpoint; seconds."""
        self.settle()
        taken = seconds(lambda: self.checkpointer.save(*self.content))
        self.drop_older()
        return taken

    def save_beside(self) -> float:
        """Write a checkpoint in the background of training; seconds in which that stands still."""
        self.settle()
        self.steps["alone"].append(seconds(self.forward_and_backward))
        taken = seconds(lambda: self.checkpointer.begin(*self.content))
        self.steps["beside a save"].append(seconds(self.forward_and_backward))
        taken += seconds(self.checkpointer.wait_for_copy)
        while self.checkpointer.busy:
            time.sleep(0.01)
        taken += seconds(self.checkpointer.finish)
        self.drop_older()
        return taken

    def forward_and_backward(self) -> None:
        """What comes before the next optimizer step."""
        self.optimizer.zero_grad()
        run_passes(self.stage, self.batches, 1, self.recipe, through=self.optimizer.through)

    def load(self) -> float:
        """Read the newest checkpoint from the disk; seconds."""
        forget(self.newest)
        return seconds(lambda: self.checkpointer.load(self.newest, self.stage, self.optimizer))

    def read_plain(self) -> float:
        """Read the same files from the disk; seconds."""
        forget(self.newest)
        return seconds(lambda: [read_plain(path) for path in sorted(self.newest.iterdir())])

    def write_plain(self) -> float:
        """Write as many bytes to the same disk; seconds."""
        self.settle()
        target, size = self.folder / "plain", self.size
        taken = seconds(lambda: write_plain(target, size))
        target.unlink()
        return taken


def seconds(action: Callable[[], object]) -> float:
    """How long something takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def forget(folder: Path) -> None:
    """Take the files of a folder, which are on the disk, out of the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write_plain(path: Path, size: int) -> None:
    """Write random bytes in large blocks, and have them put onto the disk."""
    block = memoryview(os.urandom(min(BLOCK, size)))
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, size, BLOCK):
            file.write(block[: size - begin])
        os.fsync(file.fileno())
    sync_path(path.parent)


def read_plain(path: Path) -> None:
    """Read a file in large blocks into the same memory."""
    block = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def compare(subject: Subject, rounds: int) -> Dict[str, List[float]]:
    """Seconds of every side in every round; a round before them warms up."""
    subject.save()
    sides = (subject.save, subject.save_beside, subject.write_plain, subject.load, subject.read_plain)
    found: Dict[str, List[float]] = {side.__name__: [] for side in sides}
    for number in range(-1, rounds):
        for place in range(len(sides)):
            side = sides[(place + number) % len(sides)]
            taken = side()
            if number >= 0:
                found[side.__name__].append(taken)
    return found


def ratios(found: Dict[str, List[float]]) -> Dict[str, List[float]]:
    """What the bars are about, by round."""
    pairs = {
        "asynchronous / synchronous": (found["save_beside"], found["save"]),
        "save": (found["write_plain"], found["save"]),
        "load": (found["read_plain"], found["load"]),
    }
    return {name: [a / b for a, b in zip(*sides, strict=True)] for name, sides in pairs.items()}


def report(subject: Subject, found: Dict[str, List[float]]) -> bool:
    """Print both tables; whether every bar holds."""
    size = subject.size
    print(f"checkpoint of {size:,} bytes, {subject.config.precision.dtype}, {len(found['save'])} rounds, medians")
    for name, taken in found.items():
        median = statistics.median(taken)
        rate = "" if name == "save_beside" else f"{size / median / 1e9:8.3f} GB/s"
        print(f"  {name:28}{median:9.4f} s {rate}")
    for place, taken in subject.steps.items():
        print(f"  forward and backward, {place}: {statistics.median(taken):.4f} s")
    held = True
    for name, values in ratios(found).items():
        kind, bar = BARS[name]
        median = statistics.median(values)
        holds = median <= bar if kind == "at most" else median >= bar
        held = held and holds
        spread = f"{min(values):.3f} to {max(values):.3f}"
        print(f"  {name:28}{median:9.3f}   ({spread}); bar {kind} {bar}: {'holds' if holds else 'missed'}")
    return held


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("checkpoint_speed"), help="is made, and removed at the end")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the weights")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--quick", action="store_true", help="a small model: shows that it runs, bars mean nothing")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True)
    subject = Subject(args.folder, args.dtype, args.quick)
    try:
        held = report(subject, compare(subject, args.rounds))
    finally:
        shutil.rmtree(args.folder)
        shut_down_parallel(subject.layout)
    return 0 if held or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
