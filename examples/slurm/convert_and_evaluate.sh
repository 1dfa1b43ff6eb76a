#!/usr/bin/env bash
# Rendered by tools/launch_slurm.py from examples/slurm/convert_and_evaluate.yaml: change that, not this.
#SBATCH --job-name=evaluate
#SBATCH --partition=gpu
#SBATCH --account=research
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --gres=gpu:1
#SBATCH --time=6:00:00
#SBATCH --output=runs/slurm/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --no-requeue
set -euo pipefail
# Tasks of srun get what this script exports, whatever sbatch or the site said of --export.
export SLURM_EXPORT_ENV=ALL

set +u
source .venv/bin/activate
set -u

export OMP_NUM_THREADS=12

python tools/convert_to_hf.py --checkpoint runs/fbt_1b_paper_100b --output runs/fbt_1b_paper_100b/export --force
python tools/evaluate.py --model runs/fbt_1b_paper_100b/export --tasks gsm8k --data_dir data/tasks \
    --regime standard --regime soft
