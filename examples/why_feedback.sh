#!/usr/bin/env bash
# What feedback is for, in less than four minutes on two cores without a GPU, after the install:
#
#   bash examples/why_feedback.sh [FOLDER]     # FOLDER is where everything goes, default runs/why_feedback
#
# The task: 16 digits, then for each the answer to "is the sum so far, mod 5, at least 3?". The answers are part of the
# text, but the sum is not: whoever writes it has to remember it. A Full-Bandwidth Transformer and a standard
# transformer of the same size are trained side by side with the same number of token-equivalents. Then the same weights
# write answers with feedback (SOFT) and without (STANDARD), beside the standard transformer. After an interruption, run
# it again: it goes on where it was.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=/dev/null
source examples/setup_env.sh

# Libraries warn about GPU packages and settings that play no part here. Two processes on two cores: one thread each.
export PYTHONWARNINGS=ignore OMP_NUM_THREADS=1

folder=${1:-runs/why_feedback}
rows=$folder/rows.jsonl
began=$SECONDS
mkdir -p "$folder"

say() { printf '\n== [%d s] %s\n' "$((SECONDS - began))" "$*"; }

# Trains $1.yaml into $folder/$2 in the background; `process` is its number.
train() {
    python -m megatron_fbt.pretrain --config "examples/configs/$1" --run.dir "$folder/$2" \
        --data.paths "[\"$rows\"]" --data.cache_dir "$folder/data_cache" &
    process=$!
}

export_run() {
    python tools/convert_to_hf.py --checkpoint "$folder/$1" --output "$folder/$1/export" --format fbt --force
}

# Hands an end of this script on to the training runs, which save before they leave.
processes=()
stop_training() {
    for process in ${processes[@]+"${processes[@]}"}; do
        if kill -TERM "$process" 2>/dev/null; then
            wait "$process" || true
        fi
    done
}
trap stop_training EXIT

say "1/3 data: 96,000 rows"
if [ ! -f "$rows" ]; then
    python tools/task_rows.py --task cot5 --rows 96000 --output "$rows.part"
    mv "$rows.part" "$rows"
fi

say "2/3 training both models; what the standard one prints goes to $folder/standard.log"
train why_feedback_standard.yaml standard >"$folder/standard.log" 2>&1
processes+=("$process")
train why_feedback.yaml fbt
processes+=("$process")
for process in "${processes[@]}"; do
    code=0
    wait "$process" || code=$?
    if [ "$code" -ne 0 ]; then
        printf 'why_feedback: error: a training run ended with exit code %s; see above and %s\n' "$code" \
            "$folder/standard.log" >&2
        exit "$code"
    fi
done
processes=()

say "3/3 export, then 1000 answers, written token by token"
export_run fbt
export_run standard
python tools/task_accuracy.py --model "$folder/fbt/export" --baseline "$folder/standard/export" --output "$folder"

say "done"
echo "The picture: $folder/task_accuracy.png"
