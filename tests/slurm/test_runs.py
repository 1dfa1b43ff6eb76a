"""Training under a real SLURM: both launch styles, time limit and requeue, scancel, a killed rank."""

import os
import signal
import time

import pytest

pytestmark = pytest.mark.slow
STEPS = 100
SECONDS_TO_END = 60
"""In which a step must end everywhere after one of its ranks has died."""


def wait_finished(jobs, name, job, timeout=240):
    facts = jobs.cluster.wait_ended(job, timeout)
    assert facts["JobState"] == "COMPLETED", jobs.log(name, job)
    return facts


def test_a_time_limit_saves_requeues_once_and_the_losses_are_those_of_an_unbroken_run(jobs):
    patient = ["--parallel.collective_timeout_s", "300"]
    broken = jobs.submit(jobs.write("broken", STEPS, patient, requeue={"signal_s": 3000}, time="100"))
    jobs.wait_for_step("broken", 2)
    paused = jobs.workers("broken")[0]
    os.kill(paused, signal.SIGSTOP)  # the run waits for this rank, however fast the machine is
    set_limit = ["scontrol", "update", f"JobId={broken}"]
    jobs.cluster.run(*set_limit, "TimeLimit=45")  # less than signal_s is left: SLURM warns
    jobs.cluster.wait_for(lambda: "USR1 from SLURM" in jobs.log("broken", broken), 120, what="the warning")
    os.kill(paused, signal.SIGCONT)
    jobs.cluster.run(*set_limit, "TimeLimit=100")
    facts = wait_finished(jobs, "broken", broken)
    log = jobs.log("broken", broken)
    assert facts["Restarts"] == "1" and facts["ExitCode"] == "0:0"
    assert log.count("USR1 from SLURM") == log.count(": back into the queue") == log.count("resuming from") == 1
    assert f"== job {broken}, start 1" in log and f"== job {broken}, start 2" in log  # appended, not replaced
    assert log.splitlines()[-1] == f"job {broken}: finished: exit code 0"
    first = int(log.partition("stopped by a signal after step ")[2].split(";")[0])
    assert 2 <= first < STEPS
    watched = ["--logging.straggler_interval", "50"]
    unbroken = jobs.submit(jobs.write("unbroken", STEPS, watched, launcher="srun"))
    assert wait_finished(jobs, "unbroken", unbroken)["Restarts"] == "0"
    assert jobs.log("unbroken", unbroken).count("slowest rank: ") == 2
    assert len(jobs.rows("unbroken")) == STEPS and jobs.rows("broken") == jobs.rows("unbroken")


def test_scancel_saves_and_does_not_requeue(jobs):
    job = jobs.submit(jobs.write("cancelled", 100_000, launcher="srun"))
    jobs.wait_for_step("cancelled", 3)
    jobs.cluster.run("scancel", job)
    facts = jobs.cluster.wait_ended(job, 60)
    log = jobs.log("cancelled", job)
    assert facts["JobState"] == "CANCELLED" and facts["Restarts"] == "0", log
    assert ": back into the queue" not in log
    status = jobs.status("cancelled")
    assert status["state"] == "stopped" and status["last_checkpoint"] == f"step_{status['step']:08d}", log


def test_a_rank_that_dies_ends_the_step_on_all_nodes_and_the_job_waits_before_it_starts_again(jobs):
    job = jobs.submit(jobs.write("killed", 100_000))
    jobs.wait_for_step("killed", 3)
    workers = jobs.workers("killed")
    assert len(workers) == 4
    began = time.monotonic()
    os.kill(workers[-1], signal.SIGKILL)
    jobs.cluster.wait_for(lambda: not jobs.workers("killed"), SECONDS_TO_END, what="the end of the other ranks")
    jobs.cluster.wait_for(
        lambda: ": back into the queue" in jobs.log("killed", job), SECONDS_TO_END, what="the verdict"
    )
    print(f"ended {time.monotonic() - began:.1f} s after the rank")
    assert time.monotonic() - began < SECONDS_TO_END
    log = jobs.log("killed", job)
    assert f"job {job}: failed: exit code 137, ended by signal 9, start 1 of 3 without a new checkpoint; in 60 s" in log
    jobs.cluster.wait_for(lambda: jobs.cluster.state(job) == "PENDING", 30, what="the queue")
    assert jobs.cluster.facts(job)["Restarts"] == "1"
    jobs.cluster.run("scancel", job)
