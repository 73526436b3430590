#!/usr/bin/env bash
# Environment, model, data, tool server, training. Safe to run again.
#   ./examples/search_agent/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"
cd "$ROOT"

if [ "${1:-}" = "--dry-run" ]; then
  DRY_RUN=1
  shift
fi

make_environment tool-server
say "model: SmolLM2-135M-Instruct"
run "$VENV/bin/jax-agent-rl" fetch-model
say "data"
run "$VENV/bin/python" examples/search_agent/prepare.py
start_tool_server 'tools=[search]' search.corpus=data/search_agent/corpus.jsonl
say "training"
run "$VENV/bin/jax-agent-rl" train examples/search_agent/config.yaml "search.server_url=$TOOL_SERVER_URL/retrieve" "$@"
