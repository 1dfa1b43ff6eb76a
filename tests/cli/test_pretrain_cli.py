"""python -m megatron_fbt.pretrain: faults end quickly with their exit code and one message."""

import os
import subprocess
import sys
import time

import pytest

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.pretrain import PretrainConfig
from tests.unit.data.corpus import numbered_documents, write_documents


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    """A run that could be trained, but for the fault that a test adds."""
    folder = tmp_path_factory.mktemp("pretrain")
    config = PretrainConfig()
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 4, 32, 2
    config.data.paths = [write_documents(folder / "corpus", numbered_documents(30, 13, vocab_size=64), 64)]
    config.data.sequence_length = 8
    config.data.tokenizer.path = str(byte_tokenizer(folder / "tokenizer"))
    config.data.tokenizer.type = "huggingface"
    config.training.train_steps, config.training.global_batch_size = 4, 8
    config.optimizer.lr_warmup_steps = 0
    config.precision.dtype = "fp32"
    config.run.dir = str(folder / "run")
    path = folder / "config.yaml"
    path.write_text(dump_yaml(config))
    return path


def byte_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<end>": 0, **{f"w{i}": i for i in range(1, 64)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(str(folder))
    return folder


def pretrain(config_file, *arguments, world_size=None, rank=0):
    """(exit code, standard error, seconds of processor time) of one process, as one of several if world_size is given.

    The address of the others leads nowhere: whoever opened a process group would wait.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    if world_size is not None:
        environment.update(WORLD_SIZE=str(world_size), RANK=str(rank), LOCAL_RANK=str(rank))
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    began = os.times()
    process = subprocess.run(
        [sys.executable, "-m", "megatron_fbt.pretrain", "--config", str(config_file), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    ended = os.times()
    busy = ended.children_user + ended.children_system - began.children_user - began.children_system
    return process.returncode, process.stderr, busy


TENSOR, PIPELINE = "--parallel.tensor_model_parallel_size", "--parallel.pipeline_model_parallel_size"
FAULTS = {
    "world size": (4, [TENSOR, "3"], ["parallel.", "3"]),
    "world size not tp x pp x dp": (3, [TENSOR, "2"], ["parallel.world_size = 3", "= 2"]),
    "sequence not divisible": (
        2,
        [TENSOR, "2", "--parallel.sequence_parallel", "true", "--data.sequence_length", "9"],
        ["data.sequence_length = 9", "parallel.tensor_model_parallel_size = 2"],
    ),
    "layers not divisible": (3, [PIPELINE, "3"], ["model.num_layers = 4", "pipeline_model_parallel_size = 3"]),
    "fewer micro-batches than stages": (
        4,
        [PIPELINE, "4", "--training.micro_batch_size", "4"],
        ["training.global_batch_size = 8", "2 micro-batches", "4 pipeline stages"],
    ),
    "batch not divisible": (3, [], ["training.global_batch_size = 8", "= 3"]),
    "unknown key": (None, ["--model.hiden_size", "4"], ["model.hiden_size"]),
    "wrong type": (None, ["--training.train_steps", "many"], ["training.train_steps", "integer"]),
    "other world size": (None, ["--parallel.world_size", "2"], ["parallel.world_size = 2", "1 processes"]),
    "run folder is a file": (None, ["--run.dir", __file__], ["run.dir", "not a folder"]),
    "run folder cannot be made": (None, ["--run.dir", "/dev/null/run"], ["run.dir", "cannot be made"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_configuration_that_cannot_work_is_refused_at_once(config_file, fault):
    world_size, arguments, expected = FAULTS[fault]
    code, errors, busy = pretrain(config_file, *arguments, world_size=world_size)
    assert code == 2 and errors.startswith("error: ") and errors.count("error:") == 1, errors
    assert all(text in errors for text in expected), errors
    assert "Traceback" not in errors and busy < 5


@pytest.mark.parametrize("name, value", [("WORLD_SIZE", "abc"), ("RANK", "x"), ("RANK", "-1")])
def test_a_launcher_variable_that_is_no_number_is_refused(config_file, name, value):
    command = [sys.executable, "-m", "megatron_fbt.pretrain", "--config", str(config_file)]
    ended = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and f"{name} = {value!r}" in ended.stderr and "Traceback" not in ended.stderr


def test_without_arguments_the_command_says_what_it_needs():
    command = [sys.executable, "-m", "megatron_fbt.pretrain"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and ended.stderr.startswith("error: ") and "Traceback" not in ended.stderr


def test_only_the_first_rank_of_a_machine_speaks(config_file):
    code, errors, _ = pretrain(config_file, TENSOR, "3", world_size=4, rank=1)
    assert code == 2 and errors == ""


def test_missing_data_and_tokenizer_are_data_errors(config_file, tmp_path):
    began = time.monotonic()
    missing = str(tmp_path / "nothing")
    code, errors, _ = pretrain(config_file, f"--data.paths=[{missing}]", "--run.dir", str(tmp_path / "run"))
    assert code == 3 and errors.count("error: ") == 1 and missing in errors and "Traceback" not in errors
    code, errors, busy = pretrain(config_file, "--data.tokenizer.path", missing, "--run.dir", str(tmp_path / "run"))
    assert code == 3 and missing in errors and busy < 5
    assert time.monotonic() - began < 120


@pytest.mark.parametrize(
    "tracker, folders, expected",
    [
        ("", ["step_00000002"], "names ''"),
        ("\udcff\x00", ["step_00000002"], "is not a checkpoint in"),
        ("step_00000004", ["step_00000002"], "names 'step_00000004'"),
        ("../checkpoints", ["step_00000002"], "names '../checkpoints'"),
        (None, ["step_00000002"], "is missing"),
        ("step_00000004", [], "names 'step_00000004'"),
    ],
)
def test_a_tracker_that_leads_nowhere_is_a_checkpoint_error(config_file, tmp_path, tracker, folders, expected):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in folders:
        (checkpoints / name).mkdir()
    if tracker is not None:
        (checkpoints / "latest").write_bytes(tracker.encode(errors="surrogateescape"))
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    code, errors, busy = pretrain(config_file, "--run.dir", str(tmp_path / "run"))
    assert code == 4 and errors.startswith("error: ") and "Traceback" not in errors
    assert str(checkpoints / "latest") in errors and expected in errors
    assert busy < 5 and sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_a_run_is_quiet_and_a_finished_one_is_left_as_it_is(config_file):
    folder = config_file.parent / "run"
    code, errors, _ = pretrain(config_file)
    assert (code, errors) == (0, "")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    code, errors, busy = pretrain(config_file, "--optimizer.lr", "1")
    assert (code, errors) == (0, "") and busy < 5
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
