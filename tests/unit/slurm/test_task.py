"""What a task becomes: one launcher on each node, or one rank; never both."""

import os

import pytest

from megatron_fbt.errors import ConfigError
from megatron_fbt.launch import build_parser
from megatron_fbt.slurm.task import main, node_command, rank_environment
from megatron_fbt.training.signals import SUPERVISED, is_supervised

JOB = {"SLURM_JOB_ID": "1000", "MASTER_ADDR": "here", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NUM_NODES": "3"}


def test_a_node_becomes_its_launcher():
    environment = {**JOB, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
    program, module, *words = node_command(environment, ["--nproc_per_node", "8", "-m", "x", "--config", "y"])
    assert (program, module) == ("-m", "megatron_fbt.launch")
    args = build_parser().parse_args(words)
    assert (args.nnodes, args.node_rank, args.master_addr, args.master_port) == ("2", 1, "here", 12000)
    assert (args.nproc_per_node, args.training_script, args.training_script_args) == ("8", "x", ["--config", "y"])


def test_several_launchers_on_a_node_are_refused():
    with pytest.raises(ConfigError, match="--ntasks-per-node=1"):
        node_command({**JOB, "SLURM_STEP_NUM_TASKS": "16", "SLURM_NODEID": "1"}, [])


def test_a_device_becomes_its_rank():
    environment = {**JOB, "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "11", "SLURM_LOCALID": "3"}
    assert rank_environment(environment) == {
        "RANK": "11",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "here",
        "MASTER_PORT": "12000",
    }
    assert rank_environment(environment, second_port=True)["MASTER_PORT"] == "12001"


def test_outside_of_a_job_it_says_what_is_missing(monkeypatch, capsys):
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    assert (main(["device"]), main(["neither"])) == (2, 2)
    printed = capsys.readouterr().err
    assert "let srun start this command" in printed and "node, device or check" in printed


@pytest.mark.parametrize("kind", ["node", "device", "check"])
def test_what_srun_starts_takes_no_signal_for_a_persons_second_one(monkeypatch, kind):
    environment = {**JOB, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(SUPERVISED, raising=False)
    became = []
    monkeypatch.setattr(os, "execve", lambda *call: became.append(call))
    main([kind, "-m", "megatron_fbt.pretrain"])
    assert is_supervised(became[0][2]) and SUPERVISED in became[0][2]
