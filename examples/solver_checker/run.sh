#!/usr/bin/env bash
# Environment, model, data, training. Safe to run again.
#   ./examples/solver_checker/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"

prepare_example solver_checker "" "$@"
train_example solver_checker
