#!/usr/bin/env bash
# Rendered by tools/launch_slurm.py from examples/slurm/preprocess_array.yaml: change that, not this.
#SBATCH --job-name=preprocess
#SBATCH --partition=cpu
#SBATCH --account=research
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --array=0-15%8
#SBATCH --time=4:00:00
#SBATCH --output=runs/slurm/%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --no-requeue
set -euo pipefail
# Tasks of srun get what this script exports, whatever sbatch or the site said of --export.
export SLURM_EXPORT_ENV=ALL

set +u
source .venv/bin/activate
set -u

export OMP_NUM_THREADS=8

python tools/preprocess_data.py --input data/raw --tokenizer_path data/tokenizer.model --output data/corpus \
    --shards 64 --num_nodes 16 --node_rank "$SLURM_ARRAY_TASK_ID" --workers 8
