#!/usr/bin/env bash
# Environment, model, data, training. Safe to run again.
#   ./examples/simulated_user/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"

prepare_example simulated_user "" "$@"
train_example simulated_user
