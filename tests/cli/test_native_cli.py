"""python -m megatron_fbt.inference.native as it is called: alone, and by the launcher."""

import json
import os
import subprocess
import sys

import pytest
import torch

from megatron_fbt.inference.native.__main__ import main
from tests.unit.hf.checkpoints import write_checkpoint
from tests.unit.hf.exports import LetterTokenizer
from tests.unit.hf.reference import Reference, random_weights, tiny_config

PROMPTS = ("0123", "A", "<=>?@")
MODULE = "megatron_fbt.inference.native"


def config_of(folder):
    config = tiny_config(num_query_groups=2, vocab_size=50, make_vocab_size_divisible_by=32)
    config.data.tokenizer.type, config.data.tokenizer.path = "huggingface", str(folder / "tokenizer")
    return config


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder with a checkpoint and its tokenizer; another one of rows of ids, without a tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    LetterTokenizer().save_for_huggingface(folder / "tokenizer")
    config = config_of(folder)
    write_checkpoint(folder / "run" / "checkpoints" / "step_00000010", random_weights(config), config)
    (folder / "run" / "checkpoints" / "latest").write_text("step_00000010\n")
    config.data.format, config.data.tokenizer.path = "labelled", None
    write_checkpoint(folder / "ids" / "step_00000010", random_weights(config), config)
    return folder / "run"


def expected(folder, prompt, regime, count):
    config = config_of(folder)
    ids = torch.tensor([ord(letter) - ord("0") for letter in prompt])
    tokens = Reference(random_weights(config), config).greedy(ids, regime, count)
    return tokens[: (tokens + [49]).index(49)]


def call(repository, *arguments, launcher=()):
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "-m", MODULE, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL
    )


@pytest.mark.slow
def test_one_process_prints_the_continuation(repository, run_folder):
    options = ("--regime", "fused", "--prompt", PROMPTS[0], "--max_new_tokens", "6")
    done = call(repository, "--checkpoint", str(run_folder), *options)
    assert done.returncode == 0, done.stderr
    text = "".join(chr(ord("0") + token) for token in expected(run_folder, PROMPTS[0], "fused", 6))
    assert done.stdout == text + "\n" and "tokens/s" in done.stderr


@pytest.mark.parametrize("regime", [pytest.param("soft", marks=pytest.mark.slow), "recurrent"])
def test_launched_processes_print_once(repository, run_folder, tmp_path, regime):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    launcher = ("-m", "megatron_fbt.launch", "--nproc_per_node", "2")
    options = ("--prompts", str(tmp_path / "prompts.txt"), "--regime", regime, "--max_new_tokens", "5", "--json")
    layout = ("--tensor_model_parallel_size", "2") if regime == "soft" else ("--pipeline_model_parallel_size", "2")
    done = call(repository, "--checkpoint", str(run_folder), *options, *layout, launcher=launcher)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["prompt"] for result in results] == list(PROMPTS)
    for result in results:
        assert [token for token in result["token_ids"] if token != 49] == expected(
            run_folder, result["prompt"], regime, 5
        )


@pytest.mark.slow
def test_a_run_of_ids_takes_ids(repository, run_folder):
    options = ("--prompt", "0 1 2 3", "--max_new_tokens", "4", "--json")
    done = call(repository, "--checkpoint", str(run_folder.parent / "ids" / "step_00000010"), *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == expected(run_folder, "0123", "soft", 4)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--prompt", "0", "--temperature", "-1"], 2, "temperature"),
        (["--prompt", "0", "--batch_size", "0"], 2, "batch_size"),
        (["--prompt", "0", "--max_new_tokens", "0"], 2, "max_new_tokens"),
        (["--prompt", ""], 2, "prompt is empty"),
        (["--prompts", "absent.txt"], 2, "absent.txt"),
        (["--prompt", "0", "--chat"], 2, "no chat template"),
        (["--prompt", "0", "--tensor_model_parallel_size", "2"], 2, "--nproc_per_node 2"),
        (["--prompt", "0", "--tensor_model_parallel_size", "3"], 2, "num_attention_heads"),
        (["--prompt", "0", "--pipeline_model_parallel_size", "0"], 2, "pipeline_model_parallel_size"),
        (["--prompt", "0", "--tokenizer", "absent"], 3, "tokenizer"),
    ],
)
def test_wrong_arguments_end_before_processes_join(run_folder, capsys, monkeypatch, arguments, code, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: pytest.fail("joined"))
    assert main(["--checkpoint", str(run_folder), *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def test_words_are_no_ids(run_folder, capsys):
    assert main(["--checkpoint", str(run_folder.parent / "ids" / "step_00000010"), "--prompt", "one"]) == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_no_checkpoint_there(tmp_path, capsys):
    assert main(["--checkpoint", str(tmp_path / "absent"), "--prompt", "0"]) == 4
    assert "absent" in capsys.readouterr().err


def test_help_has_an_example_and_starts_fast(repository):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", MODULE, "--help"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "python -m megatron_fbt.launch --nproc_per_node 4" in done.stdout
    assert "| torch\n" not in done.stderr.replace("  ", " ")
