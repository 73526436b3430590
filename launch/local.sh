#!/usr/bin/env bash
# Trains the quickstart agent on this machine: environment, model, data, training. Safe to run again.
#   ./launch/local.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_or_go_on "${BASH_SOURCE[0]}" "$@"
cd "$ROOT"

if [ "${1:-}" = "--dry-run" ]; then
  DRY_RUN=1
  shift
fi

make_environment
say "model: SmolLM2-135M-Instruct"
run "$VENV/bin/jax-agent-rl" fetch-model
say "data: calculator questions"
run "$VENV/bin/jax-agent-rl" prepare calculator --out data/calculator
say "training"
run "$VENV/bin/jax-agent-rl" train configs/quickstart.yaml "$@"
