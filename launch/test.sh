#!/usr/bin/env bash
# Tests what is needed to trust a change: environment, model, lint, types, import rules, and the quick tests.
#   ./launch/test.sh [--dry-run] [--all | --nightly | --only-structure | --only-vllm | --only-sglang |
#     --only-harbor | --only-harnesses] [pytest arguments]
# It begins with lint, import rules and the tests that look at all sources, pages and tables, which end it where they fail;
# --only-structure runs these alone, in under a minute.
# --all adds the slow tests, SkyPilot's parser, tests on a real vLLM (CPU build) and trials of Harbor, as CI does; --nightly
# adds the slowest, plans of GPUs, tests on SGLang's server (CPU) and tests of agent harnesses (Claude Code, Codex, …), and
# has twenty times the examples of hypothesis; --only-vllm and --only-harbor run a part of --all, --only-sglang and
# --only-harnesses one of --nightly. With pytest arguments it is these tests that run, quick or slow.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=launch/vllm_environment.sh
source "$ROOT/launch/vllm_environment.sh"
# shellcheck source=launch/sglang_environment.sh
source "$ROOT/launch/sglang_environment.sh"
# shellcheck source=launch/harbor_environment.sh
source "$ROOT/launch/harbor_environment.sh"
# shellcheck source=launch/run_tests.sh
source "$ROOT/launch/run_tests.sh"
# shellcheck source=launch/harnesses.sh
source "$ROOT/launch/harnesses.sh"
help_or_go_on "${BASH_SOURCE[0]}" "$@"
cd "$ROOT"
LINTED=(jax_agent_rl gpu_backend tests benchmarks examples)
TEST_EXTRAS=clients,dev,docs,environments,math,plan,tensorboard,tinker,trace,trackio,wandb

PARTS="structure main"
SELECTED="not vllm and not sglang and not harnesses and not slow"
VLLM_SELECTED="vllm and not nightly"
HARBOR_SELECTED="harbor and not nightly"
TYPED=(jax_agent_rl gpu_backend) # empty: what pyproject.toml includes, benchmarks and tests too
ALL=0                            # 1: slow tests too; the files that took longest are listed
NIGHTLY=0                        # 1: also plans of GPUs, whose compiler has an environment of its own
while true; do
  case "${1:-}" in
    --dry-run) DRY_RUN=1 ;;
    --all | --nightly)
      PARTS="structure main vllm harbor"
      SELECTED="not vllm and not sglang and not harnesses and not nightly"
      if [ "$1" = --nightly ]; then
        NIGHTLY=1
        PARTS="structure main vllm sglang harbor harnesses"
        SELECTED="not vllm and not sglang and not harnesses"
        VLLM_SELECTED=vllm
        HARBOR_SELECTED=harbor
      fi
      export TEST_EXAMPLES="${1#--}" # read by tests/examples.py
      TYPED=()
      ALL=1
      ;;
    --only-structure) PARTS=structure ;;
    --only-vllm) PARTS=vllm ;;
    --only-sglang) PARTS=sglang ;;
    --only-harbor) PARTS=harbor ;;
    --only-harnesses) PARTS=harnesses ;;
    *) break ;;
  esac
  shift
done
# Side by side, see tests/conftest.py: compiling takes one core at a time, and many tests wait. Slow
# tests start runs, and engines of vLLM several processes each: fewer files at a time.
WORKERS=5
if [ "$ALL" = 1 ]; then WORKERS=3; fi
SIDE_BY_SIDE=(-n "$WORKERS" --no-loadscope-reorder)
VLLM_SIDE_BY_SIDE=(-n 2 --no-loadscope-reorder)
if [ $# -gt 0 ]; then
  MOST_REPEATED=0
  SELECTED="not vllm and not sglang and not harnesses"
  VLLM_SELECTED=vllm
  HARBOR_SELECTED=harbor
  SIDE_BY_SIDE=()
  VLLM_SIDE_BY_SIDE=()
fi

# Tests that look at a page use Chromium or Chrome, and are skipped where there is neither. Where INSTALL_BROWSER=1
# allows it, the system's package is installed (Debian, Ubuntu; as root).
install_browser() {
  local name
  for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then return; fi
  done
  if [ "${INSTALL_BROWSER:-0}" != 1 ] || ! command -v apt-get >/dev/null; then
    say "no browser: tests of the report's page are skipped (INSTALL_BROWSER=1 installs one on Debian and Ubuntu)"
    return
  fi
  say "browser: chromium-headless-shell"
  run timeout 120 apt-get update -qq
  run timeout 300 apt-get install -qq -y --no-install-recommends chromium-headless-shell fonts-dejavu-core
}

# SkyPilot pins older packages than the project: the test that reads a job with its parser calls this environment.
make_sky_environment() {
  local venv="${JAX_AGENT_RL_SKY_VENV:-$ROOT/.venv-sky}"
  if "$venv/bin/python" -c 'import sky' 2>/dev/null; then return; fi
  say "SkyPilot: an environment of its own (half a minute)"
  run "$(find_python)" -m venv "$venv"
  run "$venv/bin/python" -m pip install --quiet --progress-bar off --disable-pip-version-check "skypilot==0.14.1"
}

# What a change anywhere may break, before what takes longer. With pytest arguments it is these tests that count.
test_structure() {
  make_environment "$TEST_EXTRAS"
  # What goes wrong in that is shown when the main part asks for it again.
  if [ "$ALL" = 1 ] && [ "$DRY_RUN" = 0 ]; then
    make_sky_environment >/dev/null 2>&1 &
  fi
  say "model: SmolLM2-135M-Instruct"
  run "$VENV/bin/jax-agent-rl" fetch-model
  say "lint"
  run "$VENV/bin/ruff" check "${LINTED[@]}"
  run "$VENV/bin/ruff" format --check "${LINTED[@]}"
  say "import rules"
  run "$VENV/bin/lint-imports"
  if [ $# -gt 0 ]; then return; fi
  say "tests of all sources, pages and tables; whether all tests can be imported"
  # The latter also compiles their bytecode once: in a new checkout each worker would do that for itself.
  local found collecting
  found="$(mktemp)"
  run "$VENV/bin/python" -m pytest -q --collect-only -m "$SELECTED" >"$found" 2>&1 &
  collecting=$!
  run "$VENV/bin/python" -m pytest -q -m "structural and $SELECTED"
  wait "$collecting" || {
    tail -n 50 "$found"
    return 1
  }
  if [ "$DRY_RUN" = 1 ]; then cat "$found"; fi
  rm "$found"
  SELECTED="$SELECTED and not structural"
}

# The environments of the parts that follow, while the main part runs.
make_further_environments() {
  make_vllm_environment dev
  local python
  if python="$(find_harbor_python)"; then make_harbor_environment "$python" harbor-tests; fi
}

test_main() {
  wait # for SkyPilot's environment
  # What goes wrong in that is shown when a part asks for its environment again.
  if [ "$ALL" = 1 ] && [ "$DRY_RUN" = 0 ]; then
    make_further_environments >/dev/null 2>&1 &
  fi
  if [ "$ALL" = 1 ]; then make_sky_environment || say "SkyPilot could not be installed: its parser is not asked"; fi
  if [ "$NIGHTLY" = 1 ]; then
    run ./launch/cuda_environment.sh || say "XLA's CUDA compiler could not be installed: plans of GPUs are not tested"
  fi
  install_browser || say "the browser could not be installed: tests of the report's page are skipped"
  say "tests, and types beside them"
  local types times timing=() failed=0
  types="$(mktemp)"
  times="$(mktemp)"
  # With "=": pytest looks for its configuration before it knows the option, and would take a value behind a space for the
  # path of tests and search beside that.
  if [ "$ALL" = 1 ]; then timing=(-p tests.times "--times=$times"); fi
  run "$VENV/bin/pyright" --pythonpath "$VENV/bin/python" "${TYPED[@]}" >"$types" 2>&1 &
  local checking=$!
  run_tests "$VENV/bin/python" -m "$SELECTED" --durations=10 "${timing[@]}" "${SIDE_BY_SIDE[@]}" "$@" || failed=1
  wait "$checking" || failed=1
  if [ "$ALL" = 1 ]; then run "$VENV/bin/python" -m tests.times "$times" 40; fi
  say "types"
  cat "$types"
  rm "$types" "$times"
  return "$failed"
}

# names_tests ARGUMENTS…: whether a file or folder is among pytest's arguments.
names_tests() {
  local argument
  for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then return 0; fi
  done
  return 1
}

test_vllm() {
  make_vllm_environment dev
  say "tests on vLLM"
  # Other folders have none, and import what this environment lacks.
  local tests=(tests/conformance tests/gpu_backend)
  if names_tests "$@"; then tests=(); fi
  run_tests "$VLLM_VENV/bin/python" -m "$VLLM_SELECTED" --durations=10 "${VLLM_SIDE_BY_SIDE[@]}" "${tests[@]}" "$@"
}

# From the project's own environment, which starts a server of the other.
test_sglang() {
  local python
  if ! python="$(find_sglang_python)"; then
    say "no Python 3.11 or 3.12: tests on SGLang are skipped"
    return
  fi
  make_environment "$TEST_EXTRAS"
  make_sglang_environment "$python"
  say "tests on SGLang's server"
  local tests=(tests/conformance tests/sglang)
  if names_tests "$@"; then tests=(); fi
  run env JAX_AGENT_RL_SGLANG_VENV="$SGLANG_VENV" "$VENV/bin/python" -m pytest -m sglang --durations=10 "${tests[@]}" "$@"
}

test_harbor() {
  local python
  if ! python="$(find_harbor_python)"; then
    say "no Python 3.12 or 3.13: tests of Harbor are skipped"
    return
  fi
  make_harbor_environment "$python" harbor-tests
  say "tests of Harbor"
  export LITELLM_LOCAL_MODEL_COST_MAP=True # it would ask the network for one
  # Other files import what this environment lacks.
  local tests
  mapfile -t tests < <(grep -rl --include='test_*.py' 'mark\.harbor' tests | sort)
  if names_tests "$@"; then tests=(); fi
  run_tests "$HARBOR_VENV/bin/python" -m "$HARBOR_SELECTED" --durations=10 "${VLLM_SIDE_BY_SIDE[@]}" "${tests[@]}" "$@"
}

# One at a time: each is a program of hundreds of megabytes beside its engine.
test_harnesses() {
  make_environment "$TEST_EXTRAS"
  make_harnesses
  say "tests of harnesses"
  local tests=(tests/harnesses)
  if names_tests "$@"; then tests=(); fi
  run env JAX_AGENT_RL_HARNESSES="$HARNESSES" "$VENV/bin/python" -m pytest -m harnesses --durations=10 "${tests[@]}" "$@"
}

for part in $PARTS; do
  if [ "$part" = vllm ]; then wait; fi
  "test_$part" "$@"
done
if [ "$UNSTEADY" -gt 0 ]; then say "$UNSTEADY passed only when they ran alone: see \"unsteady\" above"; fi
say "all passed"
