"""tools/prepare_cache.py: fills the cache that the run then only reads; exit codes, JSON, and what a dry run tells."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_fbt.config.dry_run import run_dry
from megatron_fbt.config.load import CommandOptions, load_yaml
from megatron_fbt.data import prepare
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.index_cache import IndexLog
from megatron_fbt.data.tokenizer import build_tokenizer
from tests.unit.data.chats import write_letter_tokenizer
from tests.unit.data.corpus import numbered_documents, write_documents

TOOL = Path(__file__).resolve().parents[2] / "tools" / "prepare_cache.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A configuration with two sources, one of them of two pairs, and a tokenizer."""
    folder = tmp_path_factory.mktemp("prepare")
    write_letter_tokenizer(folder / "letters")
    vocab_size = build_tokenizer_of(folder).vocab_size
    for number, name in enumerate(("a-0", "a-1", "b")):
        write_documents(folder / name, numbered_documents(20 + number, 13, vocab_size=vocab_size), vocab_size)
    data = {
        "sources": [
            {"name": "a", "paths": [f"{folder}/a-*"], "weight": 3},
            {"name": "b", "paths": [f"{folder}/b"], "weight": 1, "max_epochs": 1},
        ],
        "split": "8,2,0",
        "sequence_length": 8,
        "tokenizer": {"type": "huggingface", "path": f"{folder}/letters"},
    }
    training = {"train_steps": 20, "global_batch_size": 4, "eval_iters": 1}
    content = {"data": data, "training": training, "run": {"dir": f"{folder}/run"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return folder


def build_tokenizer_of(folder):
    from megatron_fbt.config.data import TokenizerConfig

    return build_tokenizer(TokenizerConfig("huggingface", str(folder / "letters")))


@pytest.fixture
def tool(monkeypatch):
    """The command, in this process."""
    monkeypatch.setattr(prepare, "set_up_messages", lambda is_main: None)
    spec = importlib.util.spec_from_file_location("prepare_cache", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_the_run_finds_what_the_command_has_built(folder):
    command = [sys.executable, str(TOOL), "--config", str(folder / "run.yaml"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(TOOL.parents[1])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert len(report["built"]) == 4 and report["found"] == [] and report["bytes"] > 1000
    assert [(source["name"], source["pairs"], source["rows"]) for source in report["data"]["sources"]] == [
        ("a", 2, 60),
        ("b", 1, 20),
    ]
    log = IndexLog()
    data = build_datasets(load_yaml(folder / "run.yaml"), build_tokenizer_of(folder), 80, 4, log=log)
    assert log.built == [] and len(log.found) == 4 and len(data.train) == 80
    assert not [name for name in os.listdir(folder / "run") if name != "data_cache"]


def test_fields_follow_as_for_the_run(folder, tool, tmp_path, capsys):
    arguments = ["--config", str(folder / "run.yaml"), "--data.cache_dir", str(tmp_path), "--training.eval_iters", "0"]
    assert tool(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "source",
        "share",
        "rows",
        "tokens",
        "epochs",
        "of",
        "tokens",
        "in",
        "documents",
        "tail",
    ]
    assert lines[1].split()[:4] == ["a", "75.0000%", "60", "480"]
    assert lines[-2].startswith("2 entries built, 0 found: ") and lines[-2].endswith(str(tmp_path))
    assert "80 rows for training, 0 for validation" in lines[-1]
    assert tool(arguments) == 0 and "0 entries built, 2 found: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, code, message",
    [
        (["--data.split", "1,1"], 2, "data.split = '1,1'"),
        (["--data.sequense_length", "4"], 2, "did you mean --data.sequence_length"),
        (
            ["--training.train_steps", "60"],
            2,
            "2.0513 epochs of b (480 tokens, an epoch has 234), above its max_epochs 1",
        ),
        (["--data.tokenizer.path", "absent"], 3, "absent"),
        (["--checkpoint.resume", "must"], 4, "there is no checkpoint"),
    ],
)
def test_errors_have_the_codes_of_the_run(folder, tool, capsys, change, code, message):
    assert tool(["--config", str(folder / "run.yaml"), *change]) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_dry_run_tells_the_same(folder, capsys):
    config = load_yaml(folder / "run.yaml")
    run_dry(config, CommandOptions(dry_run=True, json=True))
    plan = json.loads(capsys.readouterr().out)
    assert [source["epochs"] for source in plan["data"]["sources"]] == [480 / (33 * 13), 160 / (18 * 13)]
    assert plan["data_notes"] == []
    config.data.sources[1].paths = [str(folder / "absent")]
    run_dry(config, CommandOptions(dry_run=True))
    out = capsys.readouterr().out
    assert "note: source b cannot be read here: data set" in out and "absent.idx: no such file" in out
    assert [line.split() for line in out.splitlines() if line.startswith("b ")] == [
        ["b", "25.0000%", "20", "160", *"----"]
    ]
    (folder / "empty.bin").touch()
    config.data.sources[1].paths = [str(folder / "empt*.bin")]
    (folder / "empty.idx").write_bytes((folder / "b.idx").read_bytes())
    run_dry(config, CommandOptions(dry_run=True, json=True))
    notes = json.loads(capsys.readouterr().out)["data_notes"]
    assert len(notes) == 1 and notes[0].startswith(
        f"training will refuse source b: data set {folder}/empty.bin: 0 bytes"
    )
    config.data.sources, config.data.paths = [], [str(folder / "b"), str(folder / "a-?")]
    run_dry(config, CommandOptions(dry_run=True, json=True))
    plan = json.loads(capsys.readouterr().out)
    assert sum(source["rows"] for source in plan["data"]["sources"]) == 80
    assert not (folder / "run" / "config.yaml").exists()
