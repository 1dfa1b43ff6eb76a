"""tools/launch_slurm.py and tools/run_status.py as their users run them."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from megatron_fbt.training.status import write_status

JOB = "config: examples/configs/tiny_cpu.yaml\noverrides: [--run.dir, {run}]\nname: tiny\ndevices_per_node: 4\n"
SBATCH = '#!/bin/sh\necho "$@" > "$(dirname "$0")/arguments"\nenv > "$(dirname "$0")/environment"\necho "42;cluster"\n'


@pytest.fixture
def tool(repository, monkeypatch, capsys):
    """Calls a tool; exit code, standard output, standard error."""
    monkeypatch.chdir(repository)

    def call(name, *arguments):
        spec = importlib.util.spec_from_file_location(name, repository / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        code = module.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture
def job(tmp_path):
    """A job file whose run is in the test's folder."""
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(run=tmp_path / "run"))
    return path


def test_a_dry_run_prints_and_stores_nothing(tool, job, tmp_path):
    code, out, err = tool("launch_slurm", "--job", job, "--dry_run")
    assert (code, err) == (0, "") and out.startswith("#!/usr/bin/env bash\n") and "megatron_fbt.pretrain" in out
    assert not (tmp_path / "run").exists()


def test_a_script_is_stored_where_it_is_asked_for(tool, job, tmp_path):
    code, out, _ = tool("launch_slurm", "--job", job, "--output", tmp_path / "here" / "job.sh", "--json")
    report = json.loads(out)
    assert code == 0 and report["job"] is None and (tmp_path / "here" / "job.sh").read_text() == report["text"]
    assert (tmp_path / "run" / "slurm").is_dir()  # SLURM does not make the folder of a log


def test_a_job_is_stored_beside_its_run_and_submitted(tool, job, tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    given = {"SLURM_RESTART_COUNT": "5", "SLURM_JOB_ID": "7", "SLURM_CONF": "/conf", "SBATCH_QOS": "low"}
    given["MASTER_ADDR"] = "node7"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    code, out, _ = tool("launch_slurm", "--job", job, "--dependency", "afterok:41")
    received = (tmp_path / "environment").read_text()
    assert "SLURM_CONF=/conf\n" in received and "SBATCH_QOS=low\n" in received
    assert "SLURM_RESTART_COUNT" not in received and "SLURM_JOB_ID" not in received, "a job around is another one"
    assert "MASTER_ADDR" not in received
    script = tmp_path / "run" / "slurm" / "tiny.sh"
    assert code == 0 and out == f"script: {script}\njob: 42\n" and script.is_file()
    assert (tmp_path / "arguments").read_text() == f"--parsable --dependency=afterok:41 {script}\n"
    assert tool("run_status", tmp_path / "run")[0] == 0, "it waits for its first start"
    monkeypatch.delenv("SLURM_JOB_ID")
    tool("launch_slurm", "--job", job)
    assert "MASTER_ADDR=node7\n" in (tmp_path / "environment").read_text(), "outside of a job it is the user's"
    (tmp_path / "sbatch").chmod(0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = tool("launch_slurm", "--job", job)
    assert code == 2 and "sbatch" in err and "was not submitted" in err


CHAIN = """#!/bin/sh
cd "$(dirname "$0")"
echo "${MASTER_ADDR:-none} $*" >> calls
[ "$(grep -c . calls)" -le "$(cat allowed)" ] || { echo "sbatch: error: invalid account" >&2; exit 1; }
echo "$((40 + $(grep -c . calls)));cluster"
"""


@pytest.mark.parametrize("allowed, withdrawn", [(3, None), (2, "41 42\n"), (1, "41\n"), (0, None)])
def test_a_chain_that_cannot_be_submitted_whole_is_withdrawn(repository, tmp_path, allowed, withdrawn):
    for name, text in (("sbatch", CHAIN), ("scancel", '#!/bin/sh\necho "$@" > "$(dirname "$0")/cancelled"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "allowed").write_text(str(allowed))
    copy = tmp_path / "repository" / "examples" / "slurm"
    copy.mkdir(parents=True)
    shutil.copy(repository / "examples" / "slurm" / "chain.sh", copy)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "MASTER_ADDR": "node7"}
    done = subprocess.run(
        ["bash", copy / "chain.sh", "--account=a"], env=environment, capture_output=True, text=True, timeout=60
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == min(allowed + 1, 3) and all(call.startswith("none --parsable ") for call in calls)
    cancelled = tmp_path / "cancelled"
    assert (cancelled.read_text() if cancelled.exists() else None) == withdrawn
    if allowed == 3:
        assert done.returncode == 0 and done.stdout == "preprocessing 41, training 42, evaluation 43\n"
    else:
        assert done.returncode == 1 and "invalid account" in done.stderr and done.stdout == ""


def test_what_cannot_be_submitted_ends_with_2(tool, job, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = tool("launch_slurm", "--job", job)
    assert code == 2 and "sbatch: not found" in err and "login node" in err
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    code, _, err = tool("launch_slurm", "--job", job)
    assert code == 2 and "invalid partition" in err
    job.write_text(job.read_text().replace("devices_per_node: 4", "devices_per_node: 3"))
    code, _, err = tool("launch_slurm", "--job", job)
    assert code == 2 and "3" in err
    for place in ("", "-", "a\0b", str(job)):
        code, _, err = tool("launch_slurm", "--job", job, "--output", place)
        assert code == 2
    job.write_text(JOB.format(run=tmp_path / "exp#1"))
    code, _, err = tool("launch_slurm", "--job", job)
    assert code == 2 and "exp#1" in err and "plain path" in err
    job.write_text("command: if true; then\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code, _, err = tool("launch_slurm", "--job", job, "--dry_run")
    assert code == 2 and "correct setup or command" in err
    for wrong in (
        'command: ls\nsetup: ["echo \'abc"]\n',
        "command: 'cat <<END'\n",
        "command: if true; then\ncontainer: {runtime: pyxis, image: i}\n",
    ):
        job.write_text(wrong)
        code, _, err = tool("launch_slurm", "--job", job, "--dry_run")
        assert code == 2 and "correct setup or command" in err, wrong
    for character in ("\\ud800", "\\0"):
        job.write_text(f'command: "ls {character}"\n')
        code, _, err = tool("launch_slurm", "--job", job, "--dry_run")
        assert code == 2 and "no script can have" in err
    for place in ("overrides: [--run.dir=-x]", "logs: -x"):
        job.write_text(f"config: examples/configs/tiny_cpu.yaml\n{place}\ndevices_per_node: 4\n")
        code, _, err = tool("launch_slurm", "--job", job, "--dry_run")
        assert code == 2 and "'-x': would be read as an option; give ./-x" in err
    job.write_text("config: examples/configs/tiny_cpu.yaml\nlogs: a%b\ndevices_per_node: 4\n")
    code, _, err = tool("launch_slurm", "--job", job)
    assert code == 2 and "plain path" in err


def test_paths_are_relative_to_the_jobs_folder_and_scripts_to_the_callers(tool, job, repository, tmp_path, monkeypatch):
    text = job.read_text().replace(str(tmp_path / "run"), "run").replace("examples/configs/", "")
    shutil.copy(repository / "examples" / "configs" / "tiny_cpu.yaml", tmp_path)
    job.write_text(f"{text}workdir: {tmp_path}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, out, err = tool("launch_slurm", "--job", job, "--dry_run")
    assert (code, err) == (0, "") and f"#SBATCH --chdir={tmp_path}\n" in out and "--config tiny_cpu.yaml" in out
    assert tool("launch_slurm", "--job", job, "--output", "job.sh")[:2] == (0, "script: job.sh\n")
    assert (tmp_path / "elsewhere" / "job.sh").read_text() == out and (tmp_path / "run" / "slurm").is_dir()
    job.write_text(f"{text}workdir: {tmp_path / 'typo'}\n")
    code, _, err = tool("launch_slurm", "--job", job, "--output", "other.sh")
    assert code == 2 and "job.workdir" in err and "no such folder" in err and not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    "given", [["--dependency", ""], ["--dependency", " "], ["--dependency", "after:1", "--output"]]
)
def test_a_dependency_that_would_be_left_out_is_refused(tool, job, tmp_path, given):
    given = [*given, tmp_path / "job.sh"] if "--output" in given else given
    code, _, err = tool("launch_slurm", "--job", job, *given)
    assert code == 2 and err.startswith("error: --dependency ") and not (tmp_path / "run").exists()


def test_help_lists_the_fields_of_a_job_file(tool, capsys):
    with pytest.raises(SystemExit):
        tool("launch_slurm", "--help")
    printed = capsys.readouterr().out
    assert "\n  nodes (integer, 1)\n      Nodes of the job.\n" in printed and "\n  requeue.signal_s (" in printed


def test_status_of_a_run(tool, tmp_path):
    write_status(tmp_path / "status.json", state="finished", step=5, train_steps=5, loss=1.0, tokens=10)
    code, out, err = tool("run_status", tmp_path)
    assert (code, err) == (0, "") and "finished" in out and "5 of 5" in out
    code, out, _ = tool("run_status", tmp_path, "--json")
    assert code == 0 and json.loads(out)["step"] == 5
    write_status(tmp_path / "status.json", state="failed", step=5, train_steps=5)
    code, _, err = tool("run_status", tmp_path)
    assert code == 1 and "the run has failed" in err
    assert tool("run_status", tmp_path / "none")[0] == 2


def test_a_terminal_that_cannot_show_a_name_gets_its_code(tmp_path, repository):
    folder = tmp_path / "lauf\u2192"
    write_status(folder / "status.json", state="running", step=5, train_steps=5)
    command = [sys.executable, "tools/run_status.py", str(folder)]
    for locale in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}):
        environment = {**os.environ, "PYTHONPATH": str(repository), "PYTHONIOENCODING": "", **locale}
        ended = subprocess.run(command, cwd=repository, env=environment, capture_output=True, timeout=60)
        assert ended.returncode == 0 and ended.stdout.isascii() and b"lauf" in ended.stdout, ended.stderr


@pytest.mark.parametrize("name", ["run_status", "launch_slurm"])
def test_a_reader_that_leaves_early_ends_a_tool_quietly(tmp_path, repository, job, name):
    write_status(tmp_path / "status.json", state="running", note="x" * 200_000)
    job.write_text(job.read_text() + "setup: ['# " + "x" * 200_000 + "']\n")
    arguments = {"run_status": str(tmp_path), "launch_slurm": f"--job {job} --dry_run"}[name]
    command = f"{sys.executable} tools/{name}.py {arguments} --json | head -c 10; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    ended = subprocess.run(["bash", "-c", command], cwd=repository, env=environment, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr, len(ended.stdout)) == (128 + signal.SIGPIPE, b"", 10)
