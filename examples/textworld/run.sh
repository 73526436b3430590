#!/usr/bin/env bash
# Environment, model, data, training. Safe to run again.
#   ./examples/textworld/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"
cd "$ROOT"

if [ "${1:-}" = "--dry-run" ]; then
  DRY_RUN=1
  shift
fi

make_environment environments
say "model: SmolLM2-135M-Instruct"
run "$VENV/bin/jax-agent-rl" fetch-model
say "data"
run "$VENV/bin/python" examples/textworld/prepare.py
say "training"
run "$VENV/bin/jax-agent-rl" train examples/textworld/config.yaml "$@"
