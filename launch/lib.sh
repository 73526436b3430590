# shellcheck shell=bash
# Shared by the launch scripts: the project's own environment. Source it; do not run it.
# Environment: JAX_AGENT_RL_VENV (default .venv), PYTHON (default python3.12, else
# python3.13, python3.11, python3; else one that uv fetches).
#
# On Linux the default index serves torch with several GB of CUDA. Only tests and vLLM need torch, which pip installs; to
# get the CPU build, point pip at an index that has it, e.g. PIP_EXTRA_INDEX_URL=<index of CPU builds> ./launch/test.sh

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${JAX_AGENT_RL_VENV:-$ROOT/.venv}"
LOCK="$ROOT/third_party/locks/cpu.txt" # versions with hashes; launch/lock.sh writes it
UV_VERSION="0.13.9"
DEFAULT_PYTHON=3.12
NEWEST_PYTHON=3.13
SECONDS=0
DRY_RUN=0
# Container images often set this. Every process would then compile torch and transformers again, which takes 20 seconds.
unset PYTHONDONTWRITEBYTECODE

say() { printf '[%3ds] %s\n' "$SECONDS" "$*"; }

# Runs a command, or prints it under --dry-run.
run() {
  if [ "$DRY_RUN" = 1 ]; then
    printf '+ %s\n' "$*"
  else
    "$@"
  fi
}

# help_or_go_on SCRIPT ARGUMENTS…: with --help among them, prints how the script begins, and ends.
help_or_go_on() {
  local argument
  for argument in "${@:2}"; do
    case "$argument" in
      -h | --help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"
        exit 0
        ;;
    esac
  done
}

# usable_python PYTHON: whether it is there, in a version that the locks have.
usable_python() {
  command -v "$1" >/dev/null &&
    "$1" -c "import sys; sys.exit(not 11 <= sys.version_info[1] <= ${NEWEST_PYTHON#3.})" 2>/dev/null
}

# find_python: the first that is usable; where there is none, one that uv fetches.
find_python() {
  local candidate candidates="${PYTHON:-python$DEFAULT_PYTHON python3.13 python3.12 python3.11 python3}"
  for candidate in $candidates; do
    if usable_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  if [ -z "${PYTHON:-}" ] && fetch_python; then return; fi
  echo "error: Python 3.11 to $NEWEST_PYTHON is needed (not found, or of another version: $candidates): install one, or" \
    "set PYTHON=/path/to/python" >&2
  return 1
}

# fetch_python: prints the path of the one that uv fetches. The machine's own pip is asked for uv if need be.
fetch_python() {
  local uv
  if ! uv="$(command -v uv)"; then
    python3 -m pip install --quiet --target "$ROOT/.uv" "uv==$UV_VERSION" >&2 || return 1
    uv="$ROOT/.uv/bin/uv"
  fi
  say "no Python between 3.11 and $NEWEST_PYTHON: uv fetches $DEFAULT_PYTHON" >&2
  "$uv" python install --quiet "$DEFAULT_PYTHON" >&2 || return 1
  "$uv" python find "$DEFAULT_PYTHON"
}

# need_space GIGABYTES FOLDER: fails where less is free. pip would find out halfway, and name no folder.
need_space() {
  local existing="$2" free
  until [ -e "$existing" ]; do existing="$(dirname "$existing")"; done
  free="$(($(df -Pk "$existing" | awk 'NR == 2 { print $4 }') / 1048576))"
  if [ "$free" -lt "$1" ]; then
    echo "error: $2 needs about $1 GB of disk, and $free GB are free: make space, or choose another folder" >&2
    return 1
  fi
}

# locked NAME: the version of a package in $LOCK; empty: it is not there.
locked() { sed -n "s/^$1==\([^ ;]*\).*/\1/p" "$LOCK" | head -n 1; }

# make_environment EXTRAS…: creates or updates $VENV; instant when nothing changed.
make_environment() {
  local python stamp wanted extras="$*"
  python="$(find_python)"
  stamp="$VENV/.jax_agent_rl.${extras:-core}.stamp"
  wanted="$(cat "$ROOT/pyproject.toml" "$LOCK" "$ROOT"/third_party/{no-deps,test-no-deps}.txt "${BASH_SOURCE[0]}" | cksum)"
  if [ "$DRY_RUN" = 0 ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    say "environment $VENV is up to date"
    return
  fi

  say "environment: $VENV ($("$python" --version 2>&1))"
  # Measured: 1 with no extras, 4.5 for tests, 5 for those on vLLM. pip unpacks some of it twice.
  local gigabytes=2
  if [ -n "$extras" ]; then gigabytes=6; fi
  if [ ! -e "$VENV" ]; then need_space "$gigabytes" "$VENV"; fi
  # One that was interrupted has a Python and no pip.
  "$VENV/bin/python" -c 'import pip' 2>/dev/null || run "$python" -m venv "$VENV"

  say "installing pinned dependencies (a quarter of a minute to two minutes)"
  install_pinned_torch "$extras"
  install_locked -e "$ROOT${extras:+[$extras]}"
  case ",$extras," in
    *,dev,*)
      install_without_dependencies "$ROOT/third_party/no-deps.txt"
      install_without_dependencies "$ROOT/third_party/test-no-deps.txt"
      ;;
    *,jetstream,*) install_without_dependencies "$ROOT/third_party/no-deps.txt" ;;
  esac
  [ "$DRY_RUN" = 1 ] || echo "$wanted" >"$stamp"
  say "environment is ready"
}

# pip's warnings (folders of the index it cannot find, root, a newer pip) are no news; errors are shown. Modules are
# compiled when they are first imported: compiling all takes longer than unpacking them.
pip_install() {
  run "$VENV/bin/python" -m pip install --quiet --quiet --no-warn-conflicts --progress-bar off \
    --disable-pip-version-check --root-user-action ignore --no-compile "$@"
}

# install_pinned_torch EXTRAS: pip has more ways to be pointed at an index of CPU builds than uv, which leaves it as it is.
install_pinned_torch() {
  local version
  case ",$1," in
    *,dev,* | *,conformance,* | *,dense-search,* | *,vllm-cpu,*) ;;
    *) return 0 ;;
  esac
  version="$(locked torch)"
  pip_install "torch==$version"
}

# install_locked REQUIREMENTS…: with uv, which checks the hashes of $LOCK; where it cannot be had, or finds nothing (it
# reads none of pip's settings), with pip, in the same versions.
install_locked() {
  if pip_install "uv==$UV_VERSION" &&
    run "$VENV/bin/uv" pip install --quiet --python "$VENV/bin/python" --constraints "$LOCK" "$@"; then
    return
  fi
  say "uv could not install this; pip does, which takes longer"
  local versions="$VENV/.locked_versions.txt"
  [ "$DRY_RUN" = 1 ] || sed -n 's/^\([^ #]*==[^\\]*\).*/\1/p' "$LOCK" >"$versions"
  pip_install --constraint "$versions" "$@"
}

install_without_dependencies() { pip_install --no-deps -r "$1"; }

# prepare_example NAME EXTRAS [--dry-run] ARGUMENTS…: what examples/NAME needs, and what train_example passes on.
prepare_example() {
  local name="$1" extras="$2"
  shift 2
  help_or_go_on "$ROOT/examples/$name/run.sh" "$@"
  if [ "${1:-}" = "--dry-run" ]; then
    DRY_RUN=1
    shift
  fi
  ARGUMENTS=("$@")
  cd "$ROOT"
  make_environment "$extras"
  say "model: SmolLM2-135M-Instruct"
  run "$VENV/bin/jax-agent-rl" fetch-model
  say "data"
  run "$VENV/bin/python" "examples/$name/prepare.py"
}

# train_example NAME [key.path=value …]: trains its recipe with these settings, then those of the command line.
train_example() {
  say "training"
  run "$VENV/bin/jax-agent-rl" train "examples/$1/config.yaml" "${@:2}" "${ARGUMENTS[@]}"
}

# start_tool_server SETTINGS…: a tool server on a free port until the script ends; TOOL_SERVER_URL is its address.
start_tool_server() {
  if [ "$DRY_RUN" = 1 ]; then
    TOOL_SERVER_URL=http://127.0.0.1:PORT
    printf '+ %s &\n' "$VENV/bin/jax-agent-rl tool-server port=0 $*"
    return
  fi
  local log
  log="$(mktemp)"
  PYTHONUNBUFFERED=1 "$VENV/bin/jax-agent-rl" tool-server port=0 "$@" 2>"$log.errors" >"$log" &
  TOOL_SERVER_PID=$!
  # shellcheck disable=SC2064  # the names are those of now
  trap "kill $TOOL_SERVER_PID 2>/dev/null; wait $TOOL_SERVER_PID 2>/dev/null; rm -f '$log' '$log.errors'" EXIT
  until TOOL_SERVER_URL="$(sed -n 's/^tool server on \(http:[^ ]*\): .*/\1/p' "$log")" && [ -n "$TOOL_SERVER_URL" ]; do
    if ! kill -0 "$TOOL_SERVER_PID" 2>/dev/null; then
      cat "$log.errors" >&2
      echo "error: the tool server did not start; its words are above" >&2
      return 1
    fi
    sleep 0.2
  done
  say "tool server on $TOOL_SERVER_URL (its messages: $log.errors)"
}
