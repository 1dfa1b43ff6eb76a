#!/usr/bin/env bash
# Makes the Python environment of this repository ready: source it, or run it.
#
#   source examples/setup_env.sh     # afterwards `python` is the environment's
#   bash examples/setup_env.sh       # only installs
#
# Uses the active virtual environment; without one, makes .venv in the repository's root.
# Installs the versions in constraints.txt, and skips what an earlier call has installed.

fbt_say() { printf '[setup] %s\n' "$*" >&2; }

# Prints the command of a Python 3.11 or 3.12 that works.
fbt_find_python() {
    local candidate
    for candidate in python3.12 python3.11 python3 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# Activates a virtual environment: the active one, or .venv below the folder $1.
fbt_activate() {
    local root=$1 python
    if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
        fbt_say "using the active virtual environment $VIRTUAL_ENV"
    else
        if [ ! -x "$root/.venv/bin/python" ]; then
            if ! python=$(fbt_find_python); then
                fbt_say "error: Python 3.11 or 3.12 with its venv module is needed, and none is on PATH;" \
                    "install one (Debian: apt-get install python3 python3-venv) or activate a virtual environment"
                return 1
            fi
            fbt_say "making $root/.venv with $python"
            "$python" -m venv "$root/.venv" || { fbt_say "error: cannot make $root/.venv"; return 1; }
        fi
        # shellcheck disable=SC1091
        source "$root/.venv/bin/activate" || return 1
        fbt_say "using $VIRTUAL_ENV"
    fi
    export PATH="$VIRTUAL_ENV/bin:$PATH"
    if ! python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then
        fbt_say "error: $VIRTUAL_ENV has $(python --version), but Python 3.11 or 3.12 is needed;" \
            "deactivate it to have one made, or activate another"
        return 1
    fi
}

# Prints what the installation depends on, as one hash.
fbt_fingerprint() {
    python - "$1" <<'PYTHON'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
parts = [sys.version.encode(), str(root).encode()]
parts += [(root / name).read_bytes() for name in ("constraints.txt", "setup.py", "pyproject.toml")]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PYTHON
}

fbt_pip() {
    fbt_say "pip install $*"
    if ! python -m pip install --disable-pip-version-check --quiet "$@"; then
        fbt_say "error: 'pip install $*' failed; its message is above. Check the network and the free disk space" \
            "(2.5 GB are needed, several more for a PyTorch with CUDA), then run this command again"
        return 1
    fi
}

fbt_setup() {
    local root stamp fingerprint torch
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
    fbt_activate "$root" || return 1
    stamp="$VIRTUAL_ENV/.megatron_fbt_installed"
    fingerprint=$(fbt_fingerprint "$root") || return 1
    if [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ]; then
        fbt_say "already installed"
        return 0
    fi
    rm -f "$stamp"
    torch=$(grep '^torch==' "$root/constraints.txt") || { fbt_say "error: no torch in constraints.txt"; return 1; }
    # torch comes first and alone, so that pip takes the build that fits this machine before anything depends on it.
    fbt_pip "$torch" || return 1
    fbt_pip -c "$root/constraints.txt" -e "${root}[dev]" || return 1
    printf '%s\n' "$fingerprint" >"$stamp"
    fbt_say "installed"
}

fbt_setup
fbt_status=$?
unset -f fbt_say fbt_find_python fbt_activate fbt_fingerprint fbt_pip fbt_setup
# As a script, leave with the status; when sourced, hand it to the caller's ||.
if [ "${BASH_SOURCE[0]}" != "$0" ]; then
    # shellcheck disable=SC2317
    return "$fbt_status"
fi
exit "$fbt_status"
