#!/usr/bin/env bash
# Submits data, training and evaluation at once; each job starts when the one before has ended well. Extra options of
# sbatch go to every job, for example: bash examples/slurm/chain.sh --account=research
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

unset SLURM_RESTART_COUNT  # of a job around this one
mkdir -p runs/slurm runs/fbt_1b_paper_100b/slurm
data=$(sbatch --parsable "$@" examples/slurm/preprocess_array.sh)
train=$(sbatch --parsable --dependency="afterok:${data%%;*}" "$@" examples/slurm/single_node.sh)
score=$(sbatch --parsable --dependency="afterok:${train%%;*}" "$@" examples/slurm/convert_and_evaluate.sh)
printf 'preprocessing %s, training %s, evaluation %s\n' "$data" "$train" "$score"
