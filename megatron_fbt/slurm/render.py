"""From a JobConfig to a batch script for people to read: a pure function, nothing is looked up."""

import shlex
from typing import List, Optional, Sequence

from megatron_fbt.slurm.job import JobConfig

WIDTH = 116
"""A command longer than that is continued on the next line."""
EXPORTS = """# Tasks of srun get what this script exports, whatever sbatch or the site said of --export.
export SLURM_EXPORT_ENV=ALL
"""
STEPS = """
# SLURM's warning: it is passed on to the run, which saves and leaves.
warned=
step=
warn() {
    warned=$1
    echo "== $1 from SLURM, $(date +%FT%T)" >&2
    if [ "$1" = USR1 ] && [ -n "$step" ]; then kill -USR1 "$step" 2>/dev/null || true; fi
}
trap 'warn USR1' USR1
trap 'warn TERM' TERM

# Starts a job step and gives its exit code. It waits in the background, since a trap cuts only a wait short.
run_step() {
    local code=0
    "$@" &
    step=$!
    while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
    wait "$step" || code=$?
    step=
    return "$code"
}
"""
PREEMPTED = """
# A pre-emption signals the steps and leaves the script alone.
if [ -z "$warned" ] && [[ $(scontrol show job --oneliner "$SLURM_JOB_ID") == *" PreemptTime="[0-9]* ]]; then
    warned=preemption
fi
"""
NOTE = """
# A start that ends before its run is judged, as by a setup that fails, is noted, too.
began=$(date +%s)
verdict=
note_end() {
    local code=$?
    if [ -n "$verdict" ]; then return; fi
    mkdir -p "$run_dir/slurm"
    {
        printf '\\n{"job": "%s", "restart": %d, ' "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}"
        printf '"began": %d, "checkpoint": null, "ended": %d, ' "$began" "$(date +%s)"
        printf '"exit_code": %d, "verdict": "end"}\\n' "$code"
    } >>"$run_dir/slurm/starts.jsonl"
    echo "job $SLURM_JOB_ID: ended with exit code $code before its run could be judged; not put back into the queue" >&2
}
trap note_end EXIT
"""
GO_ON = """
if ! [[ "$verdict" =~ ^[0-9]+$ ]]; then exit "$code"; fi
echo "job $SLURM_JOB_ID: back into the queue" >&2
scontrol requeue "$SLURM_JOB_ID"
if [ "$verdict" -gt 0 ]; then scontrol update JobId="$SLURM_JOB_ID" StartTime="now+$verdict" || true; fi
exit "$code"
"""


def render(job: JobConfig, source: str, run_dir: Optional[str] = None) -> str:
    """The script.

    Args:
        job: checked.
        source: the job file, named in the script.
        run_dir: the run folder of a training job.
    """
    named = source if source.isprintable() else ascii(source)
    head = ["#!/usr/bin/env bash", f"# Rendered by tools/launch_slurm.py from {named}: change that, not this."]
    head += [f"#SBATCH {option}" for option in sbatch_options(job, logs_folder(job, run_dir))]
    start, setup = "\n".join([*head, "set -euo pipefail"]) + "\n" + EXPORTS, "\n".join(_setup(job)) + "\n"
    if job.command is not None:
        return start + setup + "\n" + "\n".join(_command_lines(job)) + "\n"
    places = [f"run_dir={shlex.quote(str(run_dir))}"]
    places += [f'log="{logs_folder(job, run_dir)}/$SLURM_JOB_NAME-$SLURM_JOB_ID.log"']
    return start + STEPS + "\n".join(["", *places]) + "\n" + NOTE + setup + _training(job) + GO_ON


def logs_folder(job: JobConfig, run_dir: Optional[str]) -> str:
    """Where the logs go; it must exist before the job starts."""
    return job.logs or (f"{run_dir}/slurm" if run_dir else "runs/slurm")


def sbatch_options(job: JobConfig, logs: str) -> List[str]:
    """Options of sbatch, in the order in which the script has them."""
    train, by_srun = job.config is not None, job.launcher == "srun"
    devices = job.devices_per_node
    tasks = devices if train and by_srun else 1
    options = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "reservation": job.reservation,
        "exclude": job.exclude,
        "nodes": job.nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": job.cpus_per_device * devices // tasks,
        "gres": f"{job.gres}:{devices}" if job.gres else None,
        "mem": job.mem,
        "array": job.array,
        "time": job.time,
        "signal": f"B:USR1@{job.requeue.signal_s}" if train else None,
        "output": f"{logs}/%x-%A_%a.log" if job.array else f"{logs}/%x-%j.log",
        "open-mode": "append",
        "chdir": job.workdir,
    }
    flags = [*(["--exclusive"] if job.exclusive else []), "--requeue" if train else "--no-requeue"]
    return [f"--{name}={value}" for name, value in options.items() if value is not None] + flags + job.sbatch


def _setup(job: JobConfig) -> List[str]:
    threads = f"export OMP_NUM_THREADS={job.cpus_per_device}"
    # Profiles of modules and conda read variables that are not set.
    setup = ["", "set +u", *job.setup, "set -u"] if job.setup else []
    return [*setup, "", threads]


def _step(job: JobConfig, whole: bool) -> List[str]:
    """Words before a program that runs on all nodes, or once on this one.

    Args:
        job: the job.
        whole: on all nodes, by srun.
    """
    container = job.container
    pyxis = container.runtime == "pyxis"
    words = []
    if whole or pyxis:
        words += ["srun"] + ([] if whole else ["--nodes=1", "--ntasks=1"])
    if pyxis:
        mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
        words += [f"--container-image={container.image}", *mounts, *container.options]
    return words


def _program(job: JobConfig) -> List[str]:
    """Words in front of the interpreter's arguments."""
    container = job.container
    if container.runtime != "apptainer":
        return [job.python]
    binds = [f"--bind={','.join(container.mounts)}"] if container.mounts else []
    return ["apptainer", "exec", *binds, *container.options, str(container.image), job.python]


def _here(job: JobConfig) -> List[str]:
    """Words before the arguments of an interpreter that runs once, on this node."""
    return [*_step(job, whole=False), *_program(job)]


def _all_nodes(job: JobConfig, per_node: int, wait_s: int) -> List[str]:
    """Words before the arguments of interpreters that run on all nodes."""
    srun, *container = _step(job, whole=True)
    cpus = job.cpus_per_device * job.devices_per_node // per_node
    sizes = [f"--nodes={job.nodes}", f"--ntasks={job.nodes * per_node}", f"--ntasks-per-node={per_node}"]
    ends = ["--kill-on-bad-exit=0", f"--wait={wait_s}"]
    return [srun, *sizes, f"--cpus-per-task={cpus}", *ends, *container, *_program(job)]


def _training(job: JobConfig) -> str:
    by_srun = job.launcher == "srun"
    how = ["device"] if by_srun else ["node", "--nproc_per_node", str(job.devices_per_node)]
    grace = [] if by_srun else ["--stop_grace_s", str(job.requeue.signal_s)]
    words = [
        *_all_nodes(job, job.devices_per_node if by_srun else 1, job.wait_s),
        "-m",
        "megatron_fbt.slurm.task",
        *how,
        *grace,
    ]
    words += ["-m", "megatron_fbt.pretrain", "--config", str(job.config), *job.overrides]
    train = command_text(["run_step", *words], end=" || code=$?")
    here = command_text(_here(job), end=' "$@"')
    ranks = "one task for each rank" if by_srun else "one launcher on each node"
    lines = [
        "",
        "# Runs the project's Python once, on this node.",
        f"here() {{\n{_indented(here)}\n}}",
        "",
        'here -m megatron_fbt.slurm.requeue begin --run_dir "$run_dir"',
        "# The ranks meet at MASTER_ADDR, which a submission may set; the port follows from the job id.",
        "MASTER_ADDR=$(here -m megatron_fbt.slurm.nodes address)",
        "export MASTER_ADDR",
        "",
        "code=0",
    ]
    if job.preflight.run:
        lines += ["# Bad nodes are named before the run starts.", _preflight(job)]
    lines += [
        'if [ -n "$warned" ]; then code=75; fi',
        "",
        f"# The run: {ranks}. It goes on from its newest checkpoint.",
    ]
    lines += [f'if [ "$code" = 0 ]; then\n{_indented(train)}\nfi', PREEMPTED, _verdict(job)]
    return "\n".join(lines)


def _preflight(job: JobConfig) -> str:
    limits = job.preflight
    words = [*_all_nodes(job, 1, 0), "-m", "megatron_fbt.slurm.task", "check", "-m", "megatron_fbt.preflight"]
    words += ["--devices", str(job.devices_per_node if job.gres else 0), "--min_free_gb", f"{limits.min_free_gb:g}"]
    words += ["--max_clock_skew_s", f"{limits.max_clock_skew_s:g}", "--slow_factor", f"{limits.slow_factor:g}"]
    return command_text(["run_step", *words, "--run_dir"], end=' "$run_dir" || code=$?')


def _verdict(job: JobConfig) -> str:
    """The lines that ask whether the job goes on."""
    budget = job.requeue
    words = ["here", "-m", "megatron_fbt.slurm.requeue", "end", "--max_failures", str(budget.max_failures)]
    words += [] if budget.max_restarts is None else ["--max_restarts", str(budget.max_restarts)]
    words += ["--backoff_s", str(budget.backoff_s)]
    given = '--run_dir "$run_dir" --log "$log" --exit_code "$code" --warned "$warned" --state "$state"'
    asked = command_text(words, end=f" \\\n    {given}")
    why = "# Finished, failed for good, or to be gone on with? The log's last line says why."
    state = 'state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) || state=unknown'
    return f"{why}\n{state}\nverdict=$({asked}) || verdict="


def _command_lines(job: JobConfig) -> List[str]:
    text = str(job.command).rstrip("\n")
    container = job.container
    if container.runtime == "none":
        return [text]
    inside = ["bash", "-euo", "pipefail", "-c"]
    before = _step(job, whole=False) if container.runtime == "pyxis" else _program(job)[:-1]
    return [f"{shlex.join([*before, *inside])} {shlex.quote(text)}"]


def command_text(words: Sequence[str], end: str = "") -> str:
    """A command for a script; a long one is continued over several lines, an option stays with its value."""
    lines, current = [], ""
    for place, word in enumerate(words):
        quoted = shlex.quote(word)
        value = place > 0 and words[place - 1].startswith("-") and not word.startswith("-")
        if current and len(current) + len(quoted) + 1 > WIDTH - 20 and not value:
            lines.append(current)
            current = f"    {quoted}"
        else:
            current = f"{current} {quoted}" if current else quoted
    return " \\\n".join([*lines, current]) + end


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
