#!/usr/bin/env bash
# Submits data, training and evaluation at once; each job starts when the one before has ended well. Extra options of
# sbatch go to every job, for example: bash examples/slurm/chain.sh --account=research
# If one of them is refused, those before it are cancelled.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Of a job around this one.
unset SLURM_RESTART_COUNT
[ -z "${SLURM_JOB_ID:-}" ] || unset MASTER_ADDR MASTER_PORT

submitted=()
trap '[ ${#submitted[@]} = 0 ] || scancel "${submitted[@]}"' ERR
mkdir -p runs/slurm runs/fbt_1b_paper_100b/slurm
data=$(sbatch --parsable "$@" examples/slurm/preprocess_array.sh)
submitted=("${data%%;*}") # behind it the cluster may stand
train=$(sbatch --parsable --dependency="afterok:${submitted[0]}" "$@" examples/slurm/single_node.sh)
submitted+=("${train%%;*}")
score=$(sbatch --parsable --dependency="afterok:${submitted[1]}" "$@" examples/slurm/convert_and_evaluate.sh)
submitted+=("${score%%;*}")
printf 'preprocessing %s, training %s, evaluation %s\n' "${submitted[@]}"
