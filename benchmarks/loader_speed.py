"""Rows per second of the loader, with and without processes that read ahead, against a bare memory-mapped read.

    OMP_NUM_THREADS=1 python benchmarks/loader_speed.py                    (120 MB of tokens; about two minutes)
    OMP_NUM_THREADS=1 python benchmarks/loader_speed.py --quick            (some seconds)

A random corpus is read as a run reads it: packed into rows, in the run's shuffled order, with labels, loss mask and
document starts. The bare read takes as many tokens from the same memory-mapped file at the same number of random places
and makes one tensor of them, which is the least that any loader does. All of them read the same number of rows in each
round, in an order that turns from round to round; a round begins behind the loader's first step, when it has read
up to two steps ahead. Told are the ratios of rows per second to the bare read's (above 1:
faster), and how long a step that computes for --step_ms waits for its rows.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pairs import PairResult, format_table, measure, number_of_pairs  # noqa: E402

from megatron_fbt.config.pretrain import PretrainConfig  # noqa: E402
from megatron_fbt.data.batch import BatchReader, load_micro_batches  # noqa: E402
from megatron_fbt.data.dataset import build_datasets  # noqa: E402
from megatron_fbt.data.indexed import IndexedWriter  # noqa: E402
from megatron_fbt.data.loader import RowsAhead, rows_ahead  # noqa: E402
from megatron_fbt.data.token_ids import TokenIds  # noqa: E402

READER = BatchReader(None, 0, True, True, torch.device("cpu"))
VOCABULARY = 50_000
DOCUMENT = 600
"""Tokens of a document."""


class Ids(TokenIds):
    """Ids of which 0 ends a document."""

    @property
    def eod(self) -> int:
        return 0


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=60_000_000, help="of the corpus (default: 60 million)")
    parser.add_argument("--sequence_length", type=int, default=4096, help="(default: 4096)")
    parser.add_argument("--micro_batches", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--micro_batch_size", type=int, default=4, help="rows of one (default: 4)")
    parser.add_argument("--steps", type=int, default=40, help="of a round (default: 40)")
    parser.add_argument("--rounds", type=number_of_pairs, default=8, help="that count (default: 8)")
    parser.add_argument("--step_ms", type=float, default=60.0, help="a step's own time, for the wait (default: 60)")
    parser.add_argument("--quick", action="store_true", help="a small corpus and few rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if options.quick:
        options.tokens, options.sequence_length, options.steps, options.rounds = 300_000, 256, 5, 2
        options.step_ms = 5.0
    return options


def write_corpus(prefix: str, tokens: int) -> None:
    """Random documents of DOCUMENT tokens."""
    generator = numpy.random.default_rng(0)
    writer = IndexedWriter(prefix, VOCABULARY)
    for begin in range(0, tokens, 1000 * DOCUMENT):
        documents = min(1000, -(-(tokens - begin) // DOCUMENT))
        ids = generator.integers(1, VOCABULARY, (documents, DOCUMENT))
        ids[:, -1] = 0
        writer.add(ids.ravel(), numpy.full(documents, DOCUMENT))
    writer.finish()
    writer.publish()


class Reading:
    """The rows of a corpus, read in steps.

    Args:
        options: See parse.
        folder: With the corpus; the index cache goes there as well.
    """

    def __init__(self, options: argparse.Namespace, folder: str):
        self.options, tokenizer = options, Ids(VOCABULARY)
        config = PretrainConfig()
        config.run.dir, config.data.paths, config.data.split = folder, [f"{folder}/corpus"], "1,0,0"
        config.data.sequence_length = options.sequence_length
        self.rows = build_datasets(config, tokenizer, options.tokens // options.sequence_length, 0).train
        self.file = numpy.memmap(f"{folder}/corpus.bin", mode="r", dtype=numpy.uint16)
        self.places = numpy.random.default_rng(1)
        self.step = 0
        self.ahead: Dict[int, Optional[RowsAhead]] = {
            workers: rows_ahead(workers, self.rows, tokenizer.eod, READER, lambda: self.coming(self.step))
            for workers in (0, 1, 2)
        }

    def ids(self, step: int) -> List[List[int]]:
        """Sample numbers of a step."""
        m, b = self.options.micro_batches, self.options.micro_batch_size
        return [list(range(step * m * b + n * b, step * m * b + (n + 1) * b)) for n in range(m)]

    def coming(self, step: int):
        """Those of all steps from one on."""
        while True:
            yield self.ids(step)
            step += 1

    def bare(self) -> float:
        """A round of the bare read; its seconds."""
        size, began = self.options.sequence_length + 1, time.perf_counter()
        rows = self.options.micro_batches * self.options.micro_batch_size
        for _ in range(self.options.steps):
            places = self.places.integers(0, len(self.file) - size, rows)
            torch.from_numpy(numpy.stack([self.file[place : place + size] for place in places]).astype(numpy.int64))
        return time.perf_counter() - began

    def loader(self, workers: int, step_s: float = 0.0, waits: Optional[List[float]] = None) -> float:
        """A round of the loader, begun anew; its seconds from the first step's end on, for all steps but the first."""
        self.step = 0
        for step in range(self.options.steps + 1):
            began = time.perf_counter()
            load_micro_batches(self.rows, self.ids(step), 0, READER, self.ahead[workers])
            if step == 0:  # processes start, and what was ahead of the last round is dropped
                first = time.perf_counter()
            elif waits is not None:
                waits.append(time.perf_counter() - began)
            time.sleep(step_s)
        return time.perf_counter() - first - step_s * (self.options.steps + 1)

    def close(self) -> None:
        """End the processes."""
        for ahead in self.ahead.values():
            if ahead is not None:
                ahead.close()


def compare(reading: Reading) -> Dict[str, object]:
    """Ratios of rows per second to the bare read's, and waits per step."""
    options = reading.options
    things: List[Callable[[], object]] = [reading.bare, reading.bare]
    things += [lambda workers=workers: reading.loader(workers) for workers in reading.ahead]
    bare, again, *loaders = measure(options.rounds, *things, own_clock=True)
    # Pairs are of durations: bare / loader is the ratio of rows per second loader / bare.
    ratios = {"bare / bare": PairResult.from_durations(bare, again)}
    for workers, seconds in zip(reading.ahead, loaders):
        ratios[f"num_workers {workers} / bare"] = PairResult.from_durations(bare, seconds)
    rows = options.steps * options.micro_batches * options.micro_batch_size
    waits: Dict[str, float] = {}
    for workers in reading.ahead:
        found: List[float] = []
        reading.loader(workers, options.step_ms / 1000, found)
        waits[f"num_workers {workers}"] = statistics.median(found)
    return {"rows": rows, "bare_rows_per_s": rows / statistics.median(bare), "ratios": ratios, "wait_s": waits}


def main(argv: Optional[List[str]] = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(f"{folder}/corpus", options.tokens)
        reading = Reading(options, folder)
        try:
            found = compare(reading)
        finally:
            reading.close()
    ratios = found.pop("ratios")
    if options.json:
        print(json.dumps({**found, "ratios": {name: vars(result) for name, result in ratios.items()}}))
        return 0
    print(f"bare read: {found['bare_rows_per_s']:,.0f} rows of {options.sequence_length} tokens per second")
    print(format_table(ratios))
    for name, wait in found["wait_s"].items():
        share = wait / (wait + options.step_ms / 1000)
        print(f"{name}: a step of {options.step_ms:g} ms waits {1000 * wait:.2f} ms for its rows ({share:.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
