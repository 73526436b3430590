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
export JAX_AGENT_RL_ENVIRONMENT_SECONDS="$SECONDS" # so far; the breakdown at the end begins with it
run "$VENV/bin/jax-agent-rl" quickstart "$@"
