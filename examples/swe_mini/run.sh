#!/usr/bin/env bash
# Environment, model, tasks, training. Safe to run again.
#   ./examples/swe_mini/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"

prepare_example swe_mini command "$@"
train_example swe_mini
