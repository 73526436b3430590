#!/usr/bin/env bash
# Environment, model, tasks, training. Safe to run again.
#   ./examples/terminal_tasks/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"

prepare_example terminal_tasks command "$@"
train_example terminal_tasks
