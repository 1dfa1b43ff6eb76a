"""The training command's configuration side, as its user runs it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fbt.config.load import load_yaml
from megatron_fbt.config.pretrain import PretrainConfig

ROOT = Path(__file__).resolve().parents[2]
RUN = ["--training.train_steps", "100", "--model.vocab_size", "1003"]


def python(*arguments):
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def pretrain(*arguments):
    return python("-m", "megatron_fbt.pretrain", *arguments)


def test_help_shows_fields_flags_and_an_example():
    result = pretrain("--help")
    assert result.returncode == 0
    for part in (
        "--parallel.tensor_model_parallel_size",
        "--dry_run",
        "--print_config",
        "--json",
        "torchrun",
        "Width D",
    ):
        assert part in result.stdout


def test_parsing_imports_neither_torch_nor_megatron():
    code = (
        "import sys; from megatron_fbt.config.load import parse_command_line as parse; "
        f"parse({[*RUN, '--dry_run']!r}); "
        "assert not {'torch', 'megatron.core', 'transformers'} & set(sys.modules)"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model.num_layer", "3"], ["--model.num_layer", "did you mean --model.num_layers?"]),
        (["--model.num_layers", "many"], ["model.num_layers = many", "integer"]),
        (["--model.num_layers"], ["--model.num_layers", "expected one argument"]),
        (
            ["--feedback.sequential_eval", "null"],
            ["feedback.sequential_eval = null: wrong type", "give {passes: integer"],
        ),
        (["stray"], ["stray"]),
        (["--config", "absent.yaml"], ["absent.yaml", "no such file"]),
        (["--optimizer.lr", ".nan"], ["optimizer.lr = nan", "finite number above 0"]),
        (["--data.split", "90,abc5,5"], ["data.split = '90,abc5,5'"]),
        (["--json"], ["--json", "--dry_run"]),
        (["--parallel.world_size", "3", "--parallel.tensor_model_parallel_size", "2"], ["world_size = 3", "tensor 2"]),
    ],
)
def test_errors_exit_with_2_and_one_message(arguments, parts):
    flags = [] if arguments == ["--json"] else ["--dry_run"]
    result = pretrain(*RUN, *flags, *arguments)
    assert result.returncode == 2, result.stderr
    assert [part for part in parts if part not in result.stderr] == [], result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_training_without_data_is_refused_before_anything_starts():
    start = time.monotonic()
    result = pretrain(*RUN)
    assert time.monotonic() - start < 30
    assert result.returncode == 2
    assert "data.paths" in result.stderr and "data.tokenizer.path" in result.stderr


def test_printed_configuration_can_be_read_back(tmp_path):
    schedule = "[{from_fraction: 0, passes: {1: 0.5, 2: 0.5}}]"
    result = pretrain(
        *RUN, "--print_config", "--feedback.schedule", schedule, "--run.dir", "1e3", "--optimizer.lr=1e-3"
    )
    assert result.returncode == 0, result.stderr
    path = tmp_path / "printed.yaml"
    path.write_text(result.stdout, encoding="utf-8")
    config = load_yaml(path)
    assert config.feedback.schedule[0].passes == {1: 0.5, 2: 0.5}
    assert (config.run.dir, config.optimizer.lr, config.training.train_steps) == ("1e3", 0.001, 100)
    assert config.model.num_layers == PretrainConfig().model.num_layers


def test_order_of_files_and_options(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("model: {num_layers: 2, hidden_size: 64}\nrun: {seed: 1}\n")
    second.write_text("model: {num_layers: 6}\nrun: {seed: 2}\n")
    result = pretrain(f"--config={first}", "--config", str(second), "--run.seed", "3", "--print_config")
    assert result.returncode == 0, result.stderr
    path = tmp_path / "printed.yaml"
    path.write_text(result.stdout, encoding="utf-8")
    config = load_yaml(path)
    assert (config.model.num_layers, config.model.hidden_size, config.run.seed) == (6, 64, 3)


def test_dry_run_of_a_cluster_needs_no_processes():
    cluster = ["--parallel.world_size", "1024", "--parallel.tensor_model_parallel_size", "4"]
    cluster += ["--parallel.pipeline_model_parallel_size", "4", "--training.global_batch_size", "512"]
    result = pretrain(*RUN, *cluster, "--dry_run", "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert (plan["world_size"], plan["data_parallel_size"], plan["num_microbatches"]) == (1024, 64, 8)
    table = pretrain(*RUN, *cluster, "--dry_run")
    assert table.returncode == 0, table.stderr
    assert "1,024 = tensor 4 x pipeline 4 x data 64" in table.stdout
    assert f"{plan['parameters']:,}" in table.stdout
