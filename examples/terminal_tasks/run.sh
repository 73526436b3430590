#!/usr/bin/env bash
# Environment, model, tasks, training. Safe to run again.
#   ./examples/terminal_tasks/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"

prepare_example terminal_tasks command "$@"
# Agents and tests cannot keep compiled modules in the sandbox: each of them would compile these again, for two seconds.
run "$VENV/bin/python" -c 'import openai, pytest; openai.OpenAI(api_key="-").chat.completions'
train_example terminal_tasks
