#!/usr/bin/env bash
# The environment on a TPU host; tpu_pod.sh runs it on every host. Safe to run again.
#   ./launch/tpu_environment.sh [--dry-run]
# Environment: JAX_AGENT_RL_VENV (default .venv-tpu), PYTHON, as in lib.sh.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_or_go_on "${BASH_SOURCE[0]}" "$@"

if [ "${1:-}" = "--dry-run" ]; then DRY_RUN=1; fi

# The VMs come with Ubuntu 22.04 and its Python 3.10: uv fetches a newer one.
VENV="${JAX_AGENT_RL_VENV:-$ROOT/.venv-tpu}"
LOCK="$ROOT/third_party/locks/tpu.txt"
make_environment tpu
