#!/usr/bin/env bash
# Environment, model, data, training. Safe to run again.
#   ./examples/kuhn_poker/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"

prepare_example kuhn_poker "" "$@"
train_example kuhn_poker
