"""Jobs under a real SLURM that need no training: preflight, arrays, failures at once, ports, exit codes of pipes."""

import json
import re
import sys

import pytest

from megatron_fbt.slurm.run_status import collect, describe
from megatron_fbt.slurm.submit import launch
from tests.slurm.jobs import ROOT

pytestmark = pytest.mark.slow
BAD_NODE = """
import os, sys
if "megatron_fbt.slurm.task" in sys.orig_argv:
    print("error: no device", file=sys.stderr, flush=True)
    os._exit(1)
"""
# In place of the trainer: saves when it is asked to stop; finishes where there is a checkpoint.
STAND_IN = """
import os, signal, sys, time
from pathlib import Path
if "megatron_fbt.slurm.task" in sys.orig_argv:
    folder = Path("FOLDER")
    if (folder / "checkpoints" / "latest").exists():
        os._exit(0)
    asked = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: asked.append(number))
    (folder / ("ready" + os.environ["SLURM_PROCID"])).touch()
    while not asked:
        time.sleep(0.05)
    time.sleep(1)
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "latest").write_text("step_00000001")
    os._exit(75)
"""


def write_stand_in(jobs, name):
    """A job whose trainer is the stand-in."""
    folder = jobs.folder / "stand_in"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STAND_IN.replace("FOLDER", str(jobs.folder / name)))
    return jobs.write(name, setup=[f"export PYTHONPATH={folder}:{ROOT}"])


@pytest.mark.parametrize("how", ["preempted", "requeued by an operator"])
def test_a_job_that_is_taken_from_its_nodes_saves_and_goes_on(jobs, how):
    job = jobs.submit(write_stand_in(jobs, "low"), "--partition=low")
    ready = [jobs.folder / "low" / f"ready{node}" for node in (0, 1)]
    jobs.cluster.wait_for(lambda: all(path.exists() for path in ready), 60, what="the run")
    if how == "preempted":
        command_job(jobs, "urgent", "sleep 1", partition="cpu", nodes=2, exclusive=True, python=sys.executable)
    else:
        jobs.cluster.run("scontrol", "requeue", job)
    facts = jobs.cluster.wait_ended(job, 150)
    log = jobs.log("low", job)
    assert facts["PreemptTime"] == "None"  # else a stop in the second start would be taken for a pre-emption
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), log
    assert log.count("== job") == 2 and "finished: exit code 0" in log.splitlines()[-1], log


def test_a_job_that_dies_at_once_ends_when_its_budget_is_exhausted(jobs, monkeypatch):
    (jobs.folder / "broken").mkdir()
    (jobs.folder / "broken" / "sitecustomize.py").write_text(BAD_NODE)
    setup = [f"export PYTHONPATH={jobs.folder / 'broken'}:{ROOT}"]
    job = jobs.submit(jobs.write("dies", setup=setup, requeue={"max_failures": 2, "backoff_s": 1}))
    facts = jobs.cluster.wait_ended(job, 120)
    log = jobs.log("dies", job)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "1:0", "1"), log
    assert log.count("== job") == 2 and log.count(": back into the queue") == 1
    assert log.splitlines()[-2:] == [
        "last error: error: no device",
        f"job {job}: failed: exit code 1; restart budget exhausted: 2 starts in a row without a new checkpoint "
        "(requeue.max_failures)",
    ]
    monkeypatch.setenv("SLURM_CONF", jobs.cluster.environment["SLURM_CONF"])
    report = collect(str(jobs.folder / "dies"))
    assert [start["verdict"] for start in report["starts"]] == ["1", "end"]
    assert (report["state"], report["alarm"]) == ("failed", "the run has failed: exit code 1")
    assert all(row["state"] in ("FAILED", "COMPLETING") for row in report["queue"])
    assert f"start 2          of job {job}" in describe(report)


def test_a_wrong_configuration_is_not_tried_again(jobs):
    job_file = jobs.write("wrong")
    config = jobs.folder / "wrong.config.yaml"
    script = jobs.folder / "wrong.sh"
    launch(str(job_file), output=str(script))
    config.write_text(config.read_text().replace("num_layers: 2", "num_layers: two"))
    job = jobs.cluster.submit(script)
    facts = jobs.cluster.wait_ended(job, 120)
    log = jobs.log("wrong", job)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0"), log
    last, verdict = log.splitlines()[-2:]
    assert last.startswith("last error: error: ") and "num_layers" in last, log
    assert verdict.startswith(f"job {job}: failed: exit code 2, configuration")


def test_the_preflight_asks_both_nodes_and_a_bad_one_ends_the_job(jobs):
    limits = {"min_free_gb": 0, "slow_factor": 0}
    job = jobs.submit(jobs.write("checked", preflight={**limits, "min_free_gb": 1e9}))
    facts = jobs.cluster.wait_ended(job, 150)
    log = jobs.log("checked", job)
    assert (facts["ExitCode"], facts["Restarts"]) == ("69:0", "0"), log
    assert "preflight: 2 nodes" in log and "all-reduce" in log
    assert re.search(r"bad node n1: .* GB free", log) and "submit with --exclude=n1,n2" in log
    assert log.splitlines()[-1].startswith(f"job {job}: failed: exit code 69, the preflight found a bad node")
    assert not [path for path in (jobs.folder / "checked").iterdir() if path.name.startswith(".preflight")]


def command_job(jobs, name, command, **fields):
    path = jobs.folder / f"{name}.yaml"
    setup = [f"export PYTHONPATH={ROOT}", f'exec_python() {{ "{fields.pop("python")}" "$@"; }}']
    job = {"name": name, "command": command, "exclusive": False, "time": "5", "setup": setup, **fields}
    path.write_text(json.dumps({**job, "logs": str(jobs.folder / "logs"), "workdir": str(jobs.folder)}))
    return jobs.submit(path)


def test_a_job_array_preprocesses_and_its_tasks_have_ports_of_their_own(jobs):
    for part in range(3):
        (jobs.folder / f"part-{part}.txt").write_text(f"document of part {part}\n" * (part + 1))
    command = f"""
exec_python -m megatron_fbt.slurm.nodes port > "port-$SLURM_ARRAY_TASK_ID"
exec_python {ROOT}/tools/preprocess_data.py --input "part-$SLURM_ARRAY_TASK_ID.txt" --input_format files \\
    --tokenizer_path {jobs.folder}/tokenizer.model --output "corpus-$SLURM_ARRAY_TASK_ID" --json
"""
    jobs.train_tokenizer()
    command_job(jobs, "array", command, array="0-2", python=sys.executable)
    made = [jobs.folder / f"corpus-{part}.idx" for part in range(3)]
    logs = jobs.folder / "logs"
    jobs.cluster.wait_for(
        lambda: all(path.exists() for path in made),
        150,
        what=f"the data sets: {[p.read_text() for p in logs.iterdir()]}",
    )
    ports = {int((jobs.folder / f"port-{part}").read_text()) for part in range(3)}
    assert len(ports) == 3 and all(10000 <= port < 32768 for port in ports)


def test_a_pipe_keeps_the_exit_code(jobs):
    job = command_job(jobs, "pipe", "(echo said; exit 7) | tee said\necho not reached", python=sys.executable)
    facts = jobs.cluster.wait_ended(job, 60)
    assert (facts["ExitCode"], (jobs.folder / "said").read_text()) == ("7:0", "said\n")
    assert "not reached" not in (jobs.folder / "logs" / f"pipe-{job}.log").read_text()


def test_addresses_of_a_job(jobs):
    command = """
exec_python -m megatron_fbt.slurm.nodes address
MASTER_ADDR=chosen exec_python -m megatron_fbt.slurm.nodes address
srun --ntasks=4 --ntasks-per-node=2 bash -c 'echo port $("$0" -m megatron_fbt.slurm.nodes port)' PYTHON
"""
    job = command_job(
        jobs, "address", command.replace("PYTHON", sys.executable), nodes=2, cpus_per_device=2, python=sys.executable
    )
    jobs.cluster.wait_ended(job, 90)
    lines = (jobs.folder / "logs" / f"address-{job}.log").read_text().splitlines()
    assert lines[:2] == ["127.0.0.1", "chosen"], lines  # n1 does not resolve: SLURM's address
    assert len(lines) == 6 and lines[2:] == [f"port {10000 + 2 * (int(job) % 11000)}"] * 4
