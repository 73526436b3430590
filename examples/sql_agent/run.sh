#!/usr/bin/env bash
# Environment, model, data, tool server, training. Safe to run again.
#   ./examples/sql_agent/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"

prepare_example sql_agent tool-server "$@"
start_tool_server 'tools=[sql]' sql.databases=data/sql_agent/databases
train_example sql_agent "agent.tool_server_url=$TOOL_SERVER_URL/get_observation"
