"""Rendered scripts: equal to the stored ones, clean, every #SBATCH before the first command, one launcher a node."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fbt.slurm.job import ContainerConfig, JobConfig, RequeueConfig
from megatron_fbt.slurm.job_file import load_job, run_dir_of
from megatron_fbt.slurm.render import command_text, render
from megatron_fbt.slurm.starts import read_starts

ROOT = Path(__file__).resolve().parents[3]
REFERENCES = ROOT / "tests" / "slurm" / "references"
EXAMPLES = sorted((ROOT / "examples" / "slurm").glob("*.yaml"))
SIZES = (1, 2, 512)
LAUNCHERS = ("torchrun", "srun")


def job_of(nodes, launcher="torchrun", **fields):
    setup = ["module load cuda", "export NCCL_DEBUG=WARN"]
    fields = {
        "config": "train.yaml",
        "cpus_per_device": 12,
        "gres": "gpu",
        "setup": setup,
        "partition": "gpu",
        **fields,
    }
    job = JobConfig(nodes=nodes, devices_per_node=8, launcher=launcher, **fields)
    job.validate()
    return job


def script_of(job):
    return render(job, "job.yaml", "runs/big" if job.config else None)


def options_of(script):
    return re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)


def shellcheck(path):
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    command = [tool, "--external-sources", "--severity", "warning", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("nodes", SIZES)
def test_scripts_are_the_stored_ones(nodes, launcher):
    assert script_of(job_of(nodes, launcher)) == (REFERENCES / f"{launcher}_{nodes}.sh").read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_what_their_files_give(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    job = load_job(path)
    run_dir = run_dir_of(job) if job.config else None
    source = str(path.relative_to(ROOT))
    assert render(job, source, run_dir) == path.with_suffix(".sh").read_text()
    first = path.read_text().splitlines()
    assert first[0].startswith("# ") and any(f"--job {source}" in line for line in first if line.startswith("#"))


VARIANTS = {
    "pyxis": {"container": ContainerConfig("pyxis", "/images/a b.sqsh", ["/data:/data", "/work"])},
    "apptainer": {"container": ContainerConfig("apptainer", "a.sif", ["/data"], ["--nv"])},
    "apptainer_srun": {"launcher": "srun", "container": ContainerConfig("apptainer", "a.sif")},
    "logs": {"logs": "/logs/here", "overrides": ["--run.dir", "a b", "--feedback.schedule", "{a: 'b c'}"]},
    "array": {"config": None, "command": 'echo "$SLURM_ARRAY_TASK_ID" | tee log', "array": "0-3", "gres": None},
    "command": {"config": None, "command": "echo 'it''s' | tee log", "container": ContainerConfig("pyxis", "i")},
    "cpu": {"gres": None, "python": "/opt/python", "requeue": RequeueConfig(60, 2, 5, 0), "mem": "0"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_scripts_are_clean(tmp_path, name):
    fields = {"nodes": 2, **VARIANTS[name]}
    script = script_of(job_of(**fields))
    (tmp_path / "job.sh").write_text(script)
    assert shellcheck(tmp_path / "job.sh") == ""
    lines = script.splitlines()
    commands = [place for place, line in enumerate(lines) if line and not line.startswith("#")]
    assert lines[0].startswith("#!") and lines[commands[0]] == "set -euo pipefail"
    assert max(place for place, line in enumerate(lines) if line.startswith("#SBATCH")) < commands[0]


@pytest.mark.parametrize("nodes", SIZES)
def test_one_launcher_on_each_node_or_one_task_for_each_rank(nodes):
    launchers, tasks = (script_of(job_of(nodes, launcher)) for launcher in LAUNCHERS)
    assert "--ntasks-per-node=1" in options_of(launchers) and "--ntasks-per-node=8" in options_of(tasks)
    assert f"--ntasks={nodes} --ntasks-per-node=1" in launchers and "task node --nproc_per_node 8" in launchers
    assert f"--ntasks={8 * nodes} --ntasks-per-node=8" in tasks and "task device -m megatron_fbt.pretrain" in tasks
    assert "task node" not in tasks and "task device" not in launchers
    for script in (launchers, tasks):
        assert {f"--nodes={nodes}", "--gres=gpu:8", "--requeue", "--open-mode=append"} <= set(options_of(script))
        assert "--signal=B:USR1@600" in options_of(script)


def test_a_name_of_a_job_file_stays_a_comment():
    script = render(job_of(1), "a\ntouch owned\n#.yaml", "runs/big")
    assert "\ntouch owned" not in script and script.startswith("#!/usr/bin/env bash\n# Rendered by")


def test_a_warning_during_the_setup_finds_its_trap():
    script = script_of(job_of(1))
    assert script.index("trap 'warn USR1' USR1") < script.index("module load cuda")


def test_what_the_setup_exports_reaches_the_tasks_whatever_sbatch_was_told(tmp_path):
    job = JobConfig(command="srun env", setup=["export GREETING=hello"])
    (tmp_path / "srun").write_text('#!/bin/sh\n[ "$SLURM_EXPORT_ENV" = ALL ] && exec "$@"\nexec /usr/bin/env -i "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_EXPORT_ENV": "NONE"}  # of sbatch --export=NONE
    ended = subprocess.run(["bash", "-c", script_of(job)], env=environment, capture_output=True, text=True, timeout=60)
    assert "GREETING=hello\n" in ended.stdout, ended.stderr
    for launcher in LAUNCHERS:
        script = script_of(job_of(1, launcher))
        assert script.index("export SLURM_EXPORT_ENV=ALL\n") < script.index("module load")


@pytest.mark.parametrize("setup, code", [("no_such_command", 127), ("kill -TERM $$; false", 1)])
def test_a_start_that_ends_before_its_run_leaves_a_verdict_and_a_line(tmp_path, setup, code):
    script = render(job_of(1, setup=["true", setup]), "job.yaml", str(tmp_path / "a run"))
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "SLURM_RESTART_COUNT": "2"}
    ended = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert ended.stderr.splitlines()[-1] == (
        f"job 7: ended with exit code {code} before its run could be judged; not put back into the queue"
    )
    start = read_starts(tmp_path / "a run", "7")[0]
    assert (start.restart, start.exit_code, start.verdict) == (2, code, "end") and start.ended >= start.began > 1e9


def test_containers_wrap_what_runs_on_the_nodes():
    pyxis = script_of(job_of(2, **VARIANTS["pyxis"]))
    assert pyxis.count("'--container-image=/images/a b.sqsh'") == 3  # here, preflight, run
    assert "--container-mounts=/data:/data,/work" in pyxis and "apptainer" not in pyxis
    apptainer = script_of(job_of(2, **VARIANTS["apptainer"]))
    assert apptainer.count("apptainer exec --bind=/data --nv a.sif python") == 3
    plain = script_of(job_of(2))
    assert "container" not in plain and "apptainer" not in plain
    command = script_of(job_of(1, **VARIANTS["command"]))
    assert "srun --nodes=1 --ntasks=1 --container-image=i bash -euo pipefail -c" in command


def test_optional_fields_become_options():
    names = ("partition", "account", "qos", "constraint", "reservation", "exclude", "mem")
    given = {name: f"the_{name}" for name in names}
    options = options_of(script_of(job_of(1, **given, sbatch=["--mail-type=END"], workdir="/w")))
    assert {f"--{name}=the_{name}" for name in names} | {"--mail-type=END", "--chdir=/w"} <= set(options)
    bare = options_of(script_of(job_of(1, partition=None, exclusive=False)))
    assert not [option for option in bare if option.startswith(("--partition", "--account", "--exclusive"))]


def test_without_preflight_it_is_not_in_the_script():
    job = job_of(1)
    job.preflight = dataclasses.replace(job.preflight, run=False)
    assert "preflight" in script_of(job_of(1)) and "preflight" not in script_of(job)


def test_long_commands_are_continued():
    words = [f"--option_{place}" if place % 2 else f"value_{place}" for place in range(40)]
    text = command_text(words)
    assert all(len(line) <= 120 for line in text.splitlines())
    assert text.replace("\\\n", "").split() == words
