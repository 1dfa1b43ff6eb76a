"""Mixtures in runs: stages met exactly after any stop, and an index cache that each node has for itself."""

import json
from pathlib import Path

import numpy
import pytest

from megatron_fbt.config.sources import SourceConfig, StageConfig
from megatron_fbt.core.manifest import read_manifest
from megatron_fbt.data import first_rank
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.index_cache import IndexLog
from megatron_fbt.data.prepare import prepare_cache
from megatron_fbt.errors import CheckpointError, DataError
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import STEPS, VOCAB, branch, rows_of, run, run_config, stop_before
from tests.unit.data.corpus import PlainTokenizer, data_config, numbered_documents, write_documents

SECOND, THIRD = 3, 8
"""First steps of the later stages; the batch grows until the fourth step."""
OTHER_STOPS = (2, SECOND + 1, THIRD)


def write_sources(folder):
    generator = numpy.random.default_rng(3)
    for name, low, high in (("low", 1, 50), ("high-0", 50, VOCAB), ("high-1", 50, VOCAB)):
        write_documents(folder / name, [[*generator.integers(low, high, 20), 0] for _ in range(20)], VOCAB)


def resume_after(step, folder):
    branch(Path(folder) / "whole", Path(folder) / f"after{step}", step)
    assert run(config_of(folder, f"after{step}")) == "finished"


def other_stops(rank, world_size, folder):
    for step in OTHER_STOPS:
        resume_after(step, folder)
    assert run(config_of(folder, "stopped"), stop_before(SECOND)) == "StoppedBySignal"
    assert run(config_of(folder, "stopped")) == "finished"


STAGES = [StageConfig(0), StageConfig(SECOND, {"high": 1}), StageConfig(THIRD, {"low": 2, "high": 1})]


def config_of(folder, name, stages=STAGES, **overrides):
    folder = Path(folder)
    config = run_config(folder / name, str(folder / "low"), **overrides)
    config.data.paths = []
    config.data.sources = [
        SourceConfig("low", [str(folder / "low")], weight=3),
        SourceConfig("high", [str(folder / "high-*")], weight=1, max_epochs=4),
    ]
    config.data.stages = list(stages)
    return config


def unbroken_and_broken(rank, world_size, folder):
    assert run(config_of(folder, "whole", checkpoint__save_interval=1)) == "finished"
    resume_after(SECOND, folder)
    assert run(config_of(folder, "plain", stages=[], checkpoint__save_interval=1)) == "finished"
    branch(Path(folder) / "plain", Path(folder) / "plain after", 5)
    assert run(config_of(folder, "plain after", stages=[])) == "finished"
    branch(Path(folder) / "whole", Path(folder) / "batches", 5)
    assert run(config_of(folder, "batches", training__global_batch_size=12)) == "finished"
    branch(Path(folder) / "whole", Path(folder) / "others", 5)
    others = config_of(folder, "others")
    others.data.sources[0].weight = 4.0
    assert run(others) == "CheckpointError"
    with pytest.raises(CheckpointError, match="data.sources = .*: the run has"):
        prepare_cache(others, PlainTokenizer(VOCAB))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    write_sources(folder)
    run_distributed(unbroken_and_broken, 1, str(folder), timeout=280, init_group=False)
    return folder


def test_a_run_that_stopped_at_the_bound_of_a_stage_equals_the_unbroken_one(folder):
    assert len(rows_of(folder / "whole")) == STEPS and rows_of(folder / f"after{SECOND}") == rows_of(folder / "whole")


def test_without_stages_a_stopped_run_equals_the_unbroken_one(folder):
    assert rows_of(folder / "plain after") == rows_of(folder / "plain")
    plans = [json.loads((folder / name / "data_plan.json").read_text()) for name in ("plain", "plain after")]
    assert plans[0] == plans[1] and plans[0]["stages"][0]["first_sample"] == 0


@pytest.mark.slow
def test_a_run_that_stopped_anywhere_equals_the_unbroken_one(folder):
    run_distributed(other_stops, 1, str(folder), timeout=280, init_group=False)
    for name in [*(f"after{step}" for step in OTHER_STOPS), "stopped"]:
        assert rows_of(folder / name) == rows_of(folder / "whole"), name


def test_what_a_run_reads_is_in_its_folder(folder):
    plan = json.loads((folder / "whole" / "data_plan.json").read_text())
    assert plan == json.loads((folder / f"after{SECOND}" / "data_plan.json").read_text())
    # Batches of 4 rows for four steps, then of 8.
    stages = [(stage["first_step"], stage["first_sample"], stage["samples"], stage["rows"]) for stage in plan["stages"]]
    assert stages == [
        (0, 0, 12, {"low": 9, "high": 3}),
        (SECOND, 12, 36, {"low": 0, "high": 36}),
        (THIRD, 48, 32, {"low": 21, "high": 11}),
    ]
    assert [(source["name"], source["pairs"], source["rows"]) for source in plan["sources"]] == [
        ("low", 1, 30),
        ("high", 2, 50),
    ]
    assert plan["sources"][1]["epochs"] == pytest.approx(50 * 16 / (32 * 21))


def test_stages_that_a_run_has_met_stay_where_it_met_them(folder):
    # From step 5 (sample 24) on, batches have 12 rows: the third stage begins 3 steps later.
    newest = sorted((folder / "batches" / "checkpoints").glob("step_*"))[-1]
    assert read_manifest(newest).facts["data_stages"] == [[0, 0], [SECOND, 12], [THIRD, 24 + 3 * 12]]
    assert len(rows_of(folder / "batches")) == STEPS


def rows_on_nodes(rank, world_size, folder):
    """Rank 0 is a node; ranks 1 and 2 are another one."""
    folder, found = Path(folder), {}
    first_rank.node_name = lambda: ["one", "two", "two"][rank]
    for case, cache in (("own", f"cache-{min(rank, 1)}"), ("shared", "cache"), ("broken", f"apart-{rank}")):
        config = data_config(folder / "run", [], 8, "8,2,0")
        config.data.sources = [SourceConfig("s", [str(folder / "a"), str(folder / "b")], 1)]
        config.training.train_steps, config.training.global_batch_size = 10, 4
        config.data.cache_dir, log = str(folder / cache), IndexLog()
        try:
            data = build_datasets(config, PlainTokenizer(), 40, 4, log=log)
            rows = [data.train[n]["tokens"].tolist() for n in range(40)]
            found[case] = (rows, len(log.built), len(log.found))
        except DataError as error:
            found[case] = str(error)
    labelled = data_config(folder / "run", [folder / "rows.jsonl"], 4, "1,0,0", format="labelled")
    labelled.model.vocab_size, labelled.data.cache_dir = 9, str(folder / f"cache-{min(rank, 1)}")
    found["labelled"] = build_datasets(labelled, None, 3, 0).train[1]["tokens"].tolist()
    return found


def test_each_node_has_a_cache_of_its_own_where_it_is_not_shared(tmp_path):
    for name in ("a", "b"):
        write_documents(tmp_path / name, numbered_documents(20, 13))
    row = {"input_ids": [1, 2, 3, 4], "labels": [1, 1, 1, 1]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    found = run_distributed(rows_on_nodes, 3, str(tmp_path), timeout=100)
    rows = found[0]["own"][0]
    # Training and validation: two entries. The first rank of each node builds them, the other one maps them.
    assert [result["own"] for result in found] == [(rows, 2, 0), (rows, 2, 0), (rows, 0, 0)]
    assert [result["shared"] for result in found] == [(rows, 2, 0), (rows, 0, 2), (rows, 0, 0)]
    assert all("or a disk of their node" in result["broken"] for result in found)
    assert "rank 2: index cache" in found[0]["broken"]
    assert [result["labelled"] for result in found] == [[1, 2, 3, 4]] * 3
    names = [
        sorted(path.relative_to(tmp_path / cache).as_posix() for path in (tmp_path / cache).rglob("*.*"))
        for cache in ("cache-0", "cache-1")
    ]
    assert names[0] == names[1] and len(names[0]) == 2 * 5 + 2
