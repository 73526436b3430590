#!/usr/bin/env bash
# The environment for vLLM engines and the learner on this host; gpu.sh and ray up run it. Safe to run again.
#   ./launch/gpu_environment.sh [--dry-run] cuda|cpu
# Environment: JAX_AGENT_RL_VENV (default .venv-gpu, on CPUs .venv-vllm), PYTHON, as in lib.sh.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ "${1:-}" = "--dry-run" ]; then
  DRY_RUN=1
  shift
fi

case "${1:-}" in
  cuda)
    VENV="${JAX_AGENT_RL_VENV:-$ROOT/.venv-gpu}"
    LOCK="$ROOT/third_party/locks/gpu.txt"
    NEWEST_PYTHON=3.12 # of which vLLM's packages have builds
    make_environment gpu
    ;;
  cpu)
    # shellcheck source=launch/vllm_environment.sh
    source "$ROOT/launch/vllm_environment.sh"
    VLLM_VENV="${JAX_AGENT_RL_VENV:-$VLLM_VENV}"
    make_vllm_environment
    ;;
  *)
    echo "usage: ./launch/gpu_environment.sh [--dry-run] cuda|cpu" >&2
    exit 2
    ;;
esac
