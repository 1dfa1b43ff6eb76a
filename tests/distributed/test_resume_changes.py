"""Runs that go on with other batches, another length, another number format."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_fbt.config.dry_run import run_dry
from megatron_fbt.config.load import CommandOptions
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import VOCAB, checkpoint_of, rows_of, run, run_config, stop_before, write_corpus

LENGTH = {"training__train_steps": None, "training__rampup_batch_size": None, "optimizer__lr_warmup_steps": 0}
EIGHT = {**LENGTH, "training__train_samples": 96, "training__global_batch_size": 8}
SIXTEEN = {**LENGTH, "training__train_samples": 96, "training__global_batch_size": 16}


def changed_runs(rank, world_size, folder, corpus):
    place = Path(folder)
    assert run(run_config(place / "at once", corpus, **EIGHT), stop_before(6)) == "StoppedBySignal"
    shutil.copytree(place / "at once", place / "again")
    shutil.copytree(place / "at once", place / "longer")
    assert run(run_config(place / "at once", corpus, **SIXTEEN)) == "finished"
    assert run(run_config(place / "again", corpus, **SIXTEEN), stop_before(8)) == "StoppedBySignal"
    assert run(run_config(place / "again", corpus, **SIXTEEN)) == "finished"
    assert run(run_config(place / "again", corpus, **SIXTEEN)) == "finished", "nothing to do"
    longer = {**EIGHT, "training__train_samples": None, "training__train_steps": 8}
    assert run(run_config(place / "longer", corpus, **longer)) == "finished"
    for number, dtype in enumerate(("fp32", "bf16", "bf16", "fp32"), start=1):
        config = run_config(place / "format", corpus, **{**EIGHT, "precision__dtype": dtype})
        assert run(config, stop_before(number)) == "StoppedBySignal"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changes")
    run_distributed(changed_runs, 1, str(folder), write_corpus(folder), timeout=300, init_group=False)
    return folder


def test_what_is_done_stays_done_and_the_rest_follows_from_the_new_values(folder):
    rows = rows_of(folder / "at once")
    assert [row["tokens"] // 16 for row in rows] == [8, 16, 24, 32, 40, 48, 64, 80, 96]
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert rows_of(folder / "again") == rows
    expected, found = checkpoint_of(folder / "at once", 9), checkpoint_of(folder / "again", 9)
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    # The last quarter of 96 rows is decay, from wherever a step begins.
    assert [round(row["lr"] / 0.02, 6) for row in rows] == [1, 1, 1, 1, 1, 1, 1, 1, round(1 - (80 - 72) / 24, 6)]
    assert [row["tokens"] // 16 for row in rows_of(folder / "longer")] == list(range(8, 72, 8))


def test_a_dry_run_says_whose_plan_it_is(folder, capsys, monkeypatch):
    monkeypatch.setattr("megatron_fbt.data.forecast.forecast", lambda *arguments: (None, []))  # there is no tokenizer
    corpus, known = str(folder / "corpus"), {"model__vocab_size": VOCAB}
    run_dry(run_config(folder / "format", corpus, **EIGHT, **known), CommandOptions(dry_run=True, json=True))
    plan = json.loads(capsys.readouterr().out)
    assert (plan["train_steps"], plan["train_samples"]) == (12, 96)
    told = "format has step_00000004 with 4 steps done, 8 to go: this is the plan of its resume"
    assert told in plan["notes"][0]
    run_dry(run_config(folder / "at once", corpus, **SIXTEEN, **known), CommandOptions(dry_run=True))
    assert "at once has step_00000009 with 9 steps done, the run is finished: this" in capsys.readouterr().out
    run_dry(run_config(folder / "none yet", corpus, **EIGHT, **known), CommandOptions(dry_run=True))
    assert "steps done" not in capsys.readouterr().out


def test_the_number_format_may_change_and_float32_weights_go_with_it(folder):
    names = [name for name in checkpoint_of(folder / "format", 1) if not name.startswith("optimizer.")]
    for step, halves in ((1, False), (2, True), (3, True), (4, False)):
        tensors = checkpoint_of(folder / "format", step)
        for name in names:
            assert tensors[name].dtype == (torch.bfloat16 if halves else torch.float32)
            assert (f"optimizer.master.{name}" in tensors) == halves
            assert not halves or torch.equal(tensors[f"optimizer.master.{name}"].bfloat16(), tensors[name])
    assert [row["step"] for row in rows_of(folder / "format")] == [1, 2, 3, 4]
