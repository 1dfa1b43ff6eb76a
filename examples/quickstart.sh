#!/usr/bin/env bash
# From raw text to generated text on a laptop without a GPU, in about six minutes on two cores after the install:
#
#   bash examples/quickstart.sh [FOLDER]       # FOLDER is where everything goes, default runs/quickstart
#
# Tokenizer and data set from the sources of Python's standard library; training in four processes (tensor parallel 2 x
# pipeline parallel 2) with one-, two- and three-pass batches; a stop half way and a resume; export to Hugging Face
# format; one prompt continued in three regimes. After an interruption, run it again: it goes on where it was.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=/dev/null
source examples/setup_env.sh

# Libraries warn about GPU packages and settings that play no part here. Four processes share two cores: one thread each.
export PYTHONWARNINGS=ignore OMP_NUM_THREADS=1

folder=${1:-runs/quickstart}
config=examples/configs/tiny_cpu.yaml
tokenizer=$folder/tokenizer
corpus=$folder/corpus
run=$folder/run
export_folder=$folder/export
began=$SECONDS
mkdir -p "$folder"

say() { printf '\n== [%d s] %s\n' "$((SECONDS - began))" "$*"; }
fail() {
    printf 'quickstart: error: %s\n' "$*" >&2
    exit 1
}

# Step of the last row of metrics.jsonl; 0 before the first.
steps_done() {
    local step
    step=$(sed -n 's/.*"step": \([0-9]*\).*/\1/p' "$run/metrics.jsonl" 2>/dev/null | tail -n 1) || true
    echo "${step:-0}"
}

run_state() { sed -n 's/.*"state": "\([a-z]*\)".*/\1/p' "$run/status.json" 2>/dev/null || true; }

# Trains from where the run folder stands, in the background; `launcher` is the process.
start_training() {
    python -m megatron_fbt.launch --nproc_per_node 4 -m megatron_fbt.pretrain --config "$config" \
        --run.dir "$run" --data.paths "[\"$corpus\"]" --data.tokenizer.path "$tokenizer.model" &
    launcher=$!
}

# Hands an end of this script on to the training run, which saves before it leaves.
launcher=
stop_training() {
    if [ -n "$launcher" ] && kill -TERM "$launcher" 2>/dev/null; then
        wait "$launcher" || true
    fi
}
trap stop_training EXIT

# Waits for the end of the training run and fails unless its exit code is $1.
expect_exit_code() {
    local code=0
    wait "$launcher" || code=$?
    launcher=
    [ "$code" -eq "$1" ] || fail "the training run ended with exit code $code instead of $1; its messages are above"
}

# Sends SIGTERM to the launcher once step $1 is done.
stop_at() {
    while kill -0 "$launcher" 2>/dev/null && [ "$(steps_done)" -lt "$1" ]; do sleep 0.2; done
    kill -TERM "$launcher" 2>/dev/null || true
}

sources=$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
selection=(--input "$sources" --input_format files --suffix .py .rst .txt
    --exclude site-packages dist-packages test tests idle_test)

say "1/6 tokenizer: SentencePiece, 2048 pieces, from $sources"
if [ ! -f "$tokenizer.model" ]; then
    python tools/train_tokenizer.py "${selection[@]}" --output "$tokenizer" --vocab_size 2048
fi

say "2/6 data set: one document a file"
if [ ! -f "$corpus.idx" ]; then
    python tools/preprocess_data.py "${selection[@]}" --output "$corpus" --tokenizer_path "$tokenizer.model" \
        --workers 2 --skip_bad_lines
fi
entropy=$(python tools/corpus_entropy.py "$corpus" --json | sed 's/.*"unigram_entropy": \([0-9.]*\).*/\1/')
echo "unigram entropy of the corpus: $entropy nats per token"

train_steps=$(sed -n 's/^ *train_steps: *\([0-9]*\).*/\1/p' "$config")
half=$((train_steps / 2))
if [ "$(run_state)" != finished ]; then
    if [ "$(steps_done)" -lt "$half" ]; then
        say "3/6 training in 4 processes until the middle (step $half), then SIGTERM"
        start_training
        stop_at "$half"
        expect_exit_code 75
        echo "stopped after step $(steps_done) with exit code 75: stopped and resumable"
    fi
    say "4/6 resuming with the same command"
    start_training
    expect_exit_code 0
fi

say "5/6 export to Hugging Face format"
python tools/convert_to_hf.py --checkpoint "$run" --output "$export_folder" --force

say "6/6 one prompt, three regimes"
prompt='def read_lines(path):'
for regime in standard soft fused; do
    text=$(python tools/generate.py --model "$export_folder" --regime "$regime" --prompt "$prompt" --max_new_tokens 40)
    printf -- '--- %s\n%s%s\n\n' "$regime" "$prompt" "$text"
done

say "validation loss of each pass, in nats per token"
python tools/show_validation.py --run "$run" --unigram_entropy "$entropy" --margin 0.5

say "done"
echo "Curves: tensorboard --logdir $run/tensorboard   (then open http://localhost:6006)"
echo "More text: python tools/generate.py --model $export_folder --regime soft --prompt 'import os' --temperature 0.8"
