#!/usr/bin/env bash
# Tests everything: environments, model, lint, import rules, tests, and the tests on a real vLLM (CPU build).
#   ./launch/test.sh [--dry-run] [--no-vllm | --only-vllm] [pytest arguments]
# With pytest arguments the tests on vLLM run only if --only-vllm asks for them.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=launch/vllm_environment.sh
source "$ROOT/launch/vllm_environment.sh"
help_or_go_on "${BASH_SOURCE[0]}" "$@"
cd "$ROOT"
LINTED=(jax_agent_rl gpu_backend tests benchmarks examples)

PARTS=""
while true; do
  case "${1:-}" in
    --dry-run) DRY_RUN=1 ;;
    --no-vllm) PARTS=main ;;
    --only-vllm) PARTS=vllm ;;
    *) break ;;
  esac
  shift
done
if [ -z "$PARTS" ]; then
  PARTS="main vllm"
  if [ $# -gt 0 ]; then PARTS=main; fi
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

test_main() {
  make_environment dev,docs,environments,math,plan,tensorboard,trace,trackio,wandb
  install_browser || say "the browser could not be installed: tests of the report's page are skipped"
  say "model: SmolLM2-135M-Instruct"
  run "$VENV/bin/jax-agent-rl" fetch-model
  say "lint"
  run "$VENV/bin/ruff" check "${LINTED[@]}"
  run "$VENV/bin/ruff" format --check "${LINTED[@]}"
  say "types"
  run "$VENV/bin/pyright" --pythonpath "$VENV/bin/python"
  say "import rules"
  run "$VENV/bin/lint-imports"
  say "tests"
  # All of them: side by side, see tests/conftest.py. Compiling, most of the work, takes one core at a time.
  local side_by_side=(-n 2 --no-loadscope-reorder)
  if [ $# -gt 0 ]; then side_by_side=(); fi
  run "$VENV/bin/python" -m pytest -m "not vllm" --durations=10 "${side_by_side[@]}" "$@"
}

test_vllm() {
  make_vllm_environment dev
  say "tests on vLLM"
  run "$VLLM_VENV/bin/python" -m pytest -m vllm --durations=10 "$@"
}

for part in $PARTS; do
  "test_$part" "$@"
done
say "all passed"
