"""Runs whose data are bad for some steps: back to the last good checkpoint, and on without what was read since."""

import json
import os
from pathlib import Path

import torch

from tests.distributed.launch import run_distributed
from tests.distributed.run_case import STEPS, checkpoint_of, rows_of, run, run_config, stop_before, write_corpus

OPTIONS = {
    "checkpoint__save_interval": 2,
    "checkpoint__keep_last": 2,
    "training__max_bad_steps": 2,
    "training__max_rewinds": 1,
    "model__hidden_dropout": 0.1,
    "optimizer__sharding": "megatron",
}
BAD = range(24, 40)
"""Rows of steps 6 and 7."""
EXPECTED = [range(0, 4), range(4, 8), range(8, 12), range(12, 16), range(16, 24), range(24, 32), range(32, 40)]
EXPECTED += [range(40 + 8 * n, 48 + 8 * n) for n in range(5)] + [range(0, 8), range(8, 16), range(40, 48)]
"""Rows of the steps 1 to 7, and after the return to step 4, of the steps 5 to 12; there are 80 rows."""


class Data:
    """Notes the rows that this rank reads, and makes losses of bad ones not finite.

    Args:
        bad: rows.
        dies_after: number of reads after which the rank raises.
    """

    def __init__(self, bad=(), dies_after=None):
        from megatron_fbt.training import trainer

        self.bad, self.dies_after, self.place = set(bad), dies_after, trainer
        self.read = []
        self.plain = trainer.load_micro_batches, trainer.run_passes

    def __enter__(self):
        self.place.load_micro_batches, self.place.run_passes = self.load, self.run_passes
        return self

    def __exit__(self, *exception):
        self.place.load_micro_batches, self.place.run_passes = self.plain

    def load(self, dataset, rows, *arguments):
        if len(self.read) == self.dies_after:
            raise RuntimeError("a broken rank")
        self.read.append(sorted(row for batch in rows for row in batch))
        return self.plain[0](dataset, rows, *arguments)

    def run_passes(self, *arguments, **options):
        totals = self.plain[1](*arguments, **options)
        if self.bad & set(self.read[-1]):
            totals.nll[0] = float("nan")
        return totals


def runs(rank, world_size, folder, corpus):
    place, found = Path(folder), {}
    with Data(BAD) as data:
        assert run(run_config(place / "whole", corpus, **OPTIONS)) == "finished"
    found["whole"] = data.read
    with Data(BAD):
        assert run(run_config(place / "stopped", corpus, **OPTIONS), stop_before(6, rank=1)) == "StoppedBySignal"
        assert run(run_config(place / "stopped", corpus, **OPTIONS)) == "finished"
    for name, reads in (("broken", 8), ("later", 11)):
        with Data(BAD, dies_after=reads):
            try:
                run(run_config(place / name, corpus, **OPTIONS))
            except RuntimeError as error:
                found[name] = str(error)
    with Data() as data:  # as if the data were in order now: what was left out stays so
        assert run(run_config(place / "broken", corpus, **OPTIONS)) == "finished"
        found["after"] = list(data.read)
        assert run(run_config(place / "later", corpus, **OPTIONS)) == "finished"
    with Data([*BAD, *range(56, 72)]):
        found["cap"] = run(run_config(place / "cap", corpus, **OPTIONS))
        found["early"] = run(run_config(place / "early", corpus, **{**OPTIONS, "checkpoint__save_interval": 8}))
    with Data([*BAD, *range(56, 72)]):
        config = run_config(place / "twice", corpus, **{**OPTIONS, "training__max_rewinds": 2})
        found["twice"] = run(config)
    return found


def test_a_run_goes_back_leaves_out_what_it_read_since_and_resumes_exactly(tmp_path):
    corpus = write_corpus(tmp_path)
    both = run_distributed(runs, 2, str(tmp_path), corpus, timeout=300, init_group=False)
    read = [sorted(first + second) for first, second in zip(both[0]["whole"], both[1]["whole"], strict=True)]
    assert read == [list(rows) for rows in EXPECTED]
    assert sorted(both[0]["after"][0] + both[1]["after"][0]) == list(EXPECTED[7])
    for found in both:
        assert found["broken"] == found["later"] == "a broken rank"
        assert (found["cap"], found["early"], found["twice"]) == ("BadNumbersError", "BadNumbersError", "finished")
    rows = rows_of(tmp_path / "whole")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["rewinds"] for row in rows] == [0] * 4 + [1] * 8 and rows[-1]["skipped"] == 0
    (told,) = [json.loads(line) for line in (tmp_path / "whole" / "rewinds.jsonl").read_text().splitlines()]
    assert (told["from_step"], told["to_step"], told["first_sample"], told["last_sample"]) == (7, 4, 16, 39)
    assert "training.max_bad_steps" in told["reason"]
    state = json.loads((tmp_path / "whole" / "checkpoints" / f"step_{STEPS:08d}" / "trainer_state.json").read_text())
    assert (state["left_out"], state["rewinds"], state["updates"]) == ([[16, 40]], 1, STEPS)
    for name in ("stopped", "broken", "later"):
        assert rows_of(tmp_path / name) == rows
        expected, found = checkpoint_of(tmp_path / "whole", STEPS), checkpoint_of(tmp_path / name, STEPS)
        assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    assert os.listdir(tmp_path / "cap" / "checkpoints"), "the good ones stay"
    assert json.loads((tmp_path / "cap" / "status.json").read_text())["state"] == "failed"
    twice = json.loads((tmp_path / "twice" / "checkpoints" / f"step_{STEPS:08d}" / "trainer_state.json").read_text())
    assert twice["rewinds"] == 2 and twice["left_out"] == [[16, 40], [56, 72]]
