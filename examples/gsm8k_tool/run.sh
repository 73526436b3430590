#!/usr/bin/env bash
# Environment, model, data, training. Safe to run again.
#   ./examples/gsm8k_tool/run.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/lib.sh"

prepare_example gsm8k_tool "" "$@"
train_example gsm8k_tool
