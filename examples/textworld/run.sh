#!/usr/bin/env bash
# Environment, model, data, training. Safe to run again.
#   ./examples/textworld/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"

prepare_example textworld environments "$@"
train_example textworld
