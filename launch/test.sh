#!/usr/bin/env bash
# Tests everything: environment, model, lint, import rules, tests. Further arguments go to pytest.
#   ./launch/test.sh [--dry-run] [pytest arguments]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

if [ "${1:-}" = "--dry-run" ]; then
  DRY_RUN=1
  shift
fi

make_environment dev,environments,math
say "model: SmolLM2-135M-Instruct"
run "$VENV/bin/jax-agent-rl" fetch-model
say "lint"
run "$VENV/bin/ruff" check jax_agent_rl tests benchmarks
run "$VENV/bin/ruff" format --check jax_agent_rl tests benchmarks
say "import rules"
run "$VENV/bin/lint-imports"
say "tests"
run "$VENV/bin/python" -m pytest --durations=10 "$@"
