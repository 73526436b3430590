#!/usr/bin/env bash
# Environment, model, data, tool server, training. Safe to run again.
#   ./examples/python_agent/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"

prepare_example python_agent tool-server "$@"
start_tool_server 'tools=[python]'
train_example python_agent "tool_config.server_url=$TOOL_SERVER_URL"
