"""Runs on rows with labels of their own: resumed bit for bit, equal in every layout, exported without a tokenizer."""

import json
from pathlib import Path

import pytest
import torch

from megatron_fbt.analysis.accuracy import generation_accuracy
from megatron_fbt.analysis.tasks import TASKS, write_rows
from megatron_fbt.config.feedback import PrefixConfig
from megatron_fbt.data.token_ids import run_tokenizer
from megatron_fbt.errors import CheckpointError
from megatron_fbt.hf.convert import convert_checkpoint
from megatron_fbt.inference.text import load_model, load_network
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import STEPS, branch, checkpoint_of, rows_of, run, run_config, stop_before

LENGTH = 16
COT5 = TASKS["cot5"]


def config_of(folder, name, layout=(1, 1), **overrides):
    fields = {
        "data__format": "labelled",
        "data__split": "9,1,0",
        "data__sequence_length": LENGTH,
        "model__vocab_size": COT5.vocab_size,
        "feedback__prefix": PrefixConfig(granularity="prompt"),
        "training__eval_iters": 1,
        "checkpoint__save_interval": 5,
        **overrides,
    }
    config = run_config(Path(folder) / name, str(Path(folder) / "rows.jsonl"), layout, **fields)
    config.data.tokenizer.path = None
    return config


def run_ids(config, before_step=None):
    """The run as a user starts it, without a stand-in for a tokenizer."""
    return run(config, before_step, run_tokenizer(config))


def unbroken_branched_and_stopped(rank, world_size, folder):
    assert run_ids(config_of(folder, "whole")) == "finished"
    branch(Path(folder) / "whole", Path(folder) / "branched", 5)
    assert run_ids(config_of(folder, "branched")) == "finished"
    stopped = config_of(folder, "stopped", checkpoint__save_interval=None)
    assert run_ids(stopped, stop_before(8)) == "StoppedBySignal"
    assert run_ids(stopped) == "finished"


def in_layout(rank, world_size, folder, layout):
    assert run_ids(config_of(folder, f"layout{layout[1]}", layout)) == "finished"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    write_rows(COT5.rows(60, LENGTH, torch.Generator().manual_seed(1)), folder / "rows.jsonl")
    run_distributed(unbroken_branched_and_stopped, 1, str(folder), timeout=300, init_group=False)
    return folder


@pytest.mark.parametrize("name", ["branched", "stopped"])
def test_resumed_bit_for_bit(folder, name):
    assert len(rows_of(folder / "whole")) == STEPS and rows_of(folder / name) == rows_of(folder / "whole")
    found, expected = checkpoint_of(folder / name, STEPS), checkpoint_of(folder / "whole", STEPS)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_losses_are_counted_where_labels_are(folder):
    rows = rows_of(folder / "whole")
    answers = LENGTH // 2
    assert [row["loss_tokens"] for row in rows] == [4 * answers] * 4 + [8 * answers] * (STEPS - 4)
    assert rows[0]["loss_pass_1"] < 3 and {row["passes"] for row in rows} == {1, 2, 3}
    assert "validation_loss_pass_3" in rows[-1] and "validation_loss_soft" in rows[-1]


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def test_equal_where_the_model_is_split(folder, layout):
    run_distributed(in_layout, 2, str(folder), layout, timeout=300, init_group=False)
    found, expected = rows_of(folder / f"layout{layout[1]}"), rows_of(folder / "whole")
    assert len(found) == STEPS
    for row, other in zip(found, expected):
        assert row["loss_tokens"] == other["loss_tokens"] and row["passes"] == other["passes"]
        for name in other:
            if "loss" in name:
                assert row[name] == pytest.approx(other[name], rel=2e-4), name


def test_exported_without_a_tokenizer(folder):
    export = folder / "export"
    convert_checkpoint(folder / "whole", export)
    settings = json.loads((export / "config.json").read_text())
    assert settings["vocab_size"] == COT5.vocab_size and settings.get("eos_token_id") is None
    assert not list(export.glob("*token*")) and "prompt = torch.tensor" in (export / "README.md").read_text()
    rows = COT5.rows(4, LENGTH, torch.Generator().manual_seed(2))
    assert len(generation_accuracy(load_network(export, "cpu"), rows, "soft").by_position) == LENGTH // 2
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load_model(export, "cpu")
