#!/usr/bin/env bash
# The environment with XLA's CUDA compiler, which needs no GPU: `jax-agent-rl plan --topology h100:8`. Safe to run again.
#   ./launch/cuda_environment.sh [--dry-run]
# Environment: JAX_AGENT_RL_CUDA_VENV (default .venv-cuda), PYTHON, as in lib.sh.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_or_go_on "${BASH_SOURCE[0]}" "$@"

if [ "${1:-}" = "--dry-run" ]; then DRY_RUN=1; fi

# The versions of GPU hosts, without vLLM: what compiles here is what would run there.
VENV="${JAX_AGENT_RL_CUDA_VENV:-$ROOT/.venv-cuda}"
LOCK="$ROOT/third_party/locks/gpu.txt"
make_environment cuda
say "plan with it: $VENV/bin/jax-agent-rl plan CONFIG --topology h100:8"
