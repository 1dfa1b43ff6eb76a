#!/usr/bin/env bash
# Runs the tests, after making the environment ready.
#
#   bash tests/run.sh               the default tests (some minutes on 2 cores)
#   bash tests/run.sh --slow        and those marked slow
#   bash tests/run.sh --soak        everything
#   bash tests/run.sh [pytest options and paths], e.g.: -k config, tests/unit, -n 0
set -u

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 1
cd "$root" || exit 1

selection=()
rest=()
for argument in "$@"; do
    case "$argument" in
        -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        --slow) selection=(-m "not soak") ;;
        --soak) selection=(-m "slow or not slow") ;;
        *) rest+=("$argument") ;;
    esac
done

# shellcheck source=examples/setup_env.sh
source examples/setup_env.sh || exit 1
export OMP_NUM_THREADS=1

echo "[tests] ruff check, shellcheck" >&2
ruff check . || exit 1
find . -path './.venv*' -prune -o \( -name '*.sh' -o -path './.ci/run' \) -print0 | sort -z |
    xargs -0 -r shellcheck --external-sources --severity warning || exit 1

exec python -m pytest -n 2 --dist loadfile ${selection[@]+"${selection[@]}"} ${rest[@]+"${rest[@]}"}
