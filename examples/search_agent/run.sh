#!/usr/bin/env bash
# Environment, model, data, tool server, training. Safe to run again.
#   ./examples/search_agent/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"

prepare_example search_agent tool-server "$@"
start_tool_server 'tools=[search]' search.corpus=data/search_agent/corpus.jsonl ${SEARCH_ENCODER:+"search.encoder=$SEARCH_ENCODER"}
train_example search_agent "search.server_url=$TOOL_SERVER_URL/retrieve"
