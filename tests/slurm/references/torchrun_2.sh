#!/usr/bin/env bash
# Rendered by tools/launch_slurm.py from job.yaml: change that, not this.
#SBATCH --job-name=fbt
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --gres=gpu:8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --output=runs/big/slurm/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --requeue
set -euo pipefail
# Tasks of srun get what this script exports, whatever sbatch or the site said of --export.
export SLURM_EXPORT_ENV=ALL

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

run_dir=runs/big
log="runs/big/slurm/$SLURM_JOB_NAME-$SLURM_JOB_ID.log"

# A start that ends before its run is judged, as by a setup that fails, is noted, too.
began=$(date +%s)
verdict=
note_end() {
    local code=$?
    if [ -n "$verdict" ]; then return; fi
    mkdir -p "$run_dir/slurm"
    {
        printf '\n{"job": "%s", "restart": %d, ' "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}"
        printf '"began": %d, "checkpoint": null, "ended": %d, ' "$began" "$(date +%s)"
        printf '"exit_code": %d, "verdict": "end"}\n' "$code"
    } >>"$run_dir/slurm/starts.jsonl"
    echo "job $SLURM_JOB_ID: ended with exit code $code before its run could be judged; not put back into the queue" >&2
}
trap note_end EXIT

set +u
module load cuda
export NCCL_DEBUG=WARN
set -u

export OMP_NUM_THREADS=12

# Runs the project's Python once, on this node.
here() {
    python "$@"
}

here -m megatron_fbt.slurm.requeue begin --run_dir "$run_dir"
# The ranks meet at MASTER_ADDR, which a submission may set; the port follows from the job id.
MASTER_ADDR=$(here -m megatron_fbt.slurm.nodes address)
export MASTER_ADDR

code=0
# Bad nodes are named before the run starts.
run_step srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=96 --kill-on-bad-exit=0 \
    --wait=0 python -m megatron_fbt.slurm.task check -m megatron_fbt.preflight --devices 8 \
    --min_free_gb 10 --max_clock_skew_s 5 --slow_factor 0.7 --run_dir "$run_dir" || code=$?
if [ -n "$warned" ]; then code=75; fi

# The run: one launcher on each node. It goes on from its newest checkpoint.
if [ "$code" = 0 ]; then
    run_step srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=96 --kill-on-bad-exit=0 \
        --wait=30 python -m megatron_fbt.slurm.task node --nproc_per_node 8 --stop_grace_s 600 -m megatron_fbt.pretrain \
        --config train.yaml || code=$?
fi

# A pre-emption signals the steps and leaves the script alone.
if [ -z "$warned" ] && [[ $(scontrol show job --oneliner "$SLURM_JOB_ID") == *" PreemptTime="[0-9]* ]]; then
    warned=preemption
fi

# Finished, failed for good, or to be gone on with? The log's last line says why.
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) || state=unknown
verdict=$(here -m megatron_fbt.slurm.requeue end --max_failures 3 --backoff_s 60 \
    --run_dir "$run_dir" --log "$log" --exit_code "$code" --warned "$warned" --state "$state") || verdict=
if ! [[ "$verdict" =~ ^[0-9]+$ ]]; then exit "$code"; fi
echo "job $SLURM_JOB_ID: back into the queue" >&2
scontrol requeue "$SLURM_JOB_ID"
if [ "$verdict" -gt 0 ]; then scontrol update JobId="$SLURM_JOB_ID" StartTime="now+$verdict" || true; fi
exit "$code"
