#!/usr/bin/env bash
# Runs on a machine with an NVIDIA GPU what was only compiled for one: kernels, a run with each engine, certify. It takes
# under ten minutes once the environment is there; what it printed lies in gpu_check/, with certify's report.
#   ./launch/gpu_check.sh [--dry-run]
# Environment: JAX_AGENT_RL_VENV (default .venv-gpu), PYTHON, as in lib.sh.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_or_go_on "${BASH_SOURCE[0]}" "$@"

if [ "${1:-}" = "--dry-run" ]; then DRY_RUN=1; fi
export JAX_AGENT_RL_VENV="${JAX_AGENT_RL_VENV:-$ROOT/.venv-gpu}"
VENV="$JAX_AGENT_RL_VENV"
FOLDER="$ROOT/gpu_check"
# vLLM, and engines of other processes, need memory beside JAX.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
FAILED=()
cd "$ROOT"

# check NAME SECONDS COMMAND…: runs a part with a limit; what fails ends no other part.
check() {
  local name="$1" limit="$2"
  shift 2
  say "$name (at most $limit s)"
  if [ "$DRY_RUN" = 1 ]; then
    run timeout "$limit" "$@"
  elif ! timeout "$limit" "$@" >"$FOLDER/$name.txt" 2>&1; then
    tail -n 5 "$FOLDER/$name.txt"
    FAILED+=("$name")
  fi
}

# gpus: how many there are.
gpus() { nvidia-smi --list-gpus 2>/dev/null | wc -l; }

if [ "$DRY_RUN" = 0 ] && [ "$(gpus)" = 0 ]; then
  echo "error: nvidia-smi lists no GPU; on a machine without one, jax-agent-rl plan compiles for it: docs/gpu.md" >&2
  exit 1
fi
if [ "$DRY_RUN" = 1 ]; then ./launch/gpu_environment.sh --dry-run cuda; else ./launch/gpu_environment.sh cuda; fi
pip_install "pytest>=8.4" # of the conformance suite
run "$VENV/bin/jax-agent-rl" fetch-model
run mkdir -p "$FOLDER"

SECONDS=0
JAX_AGENT_RL=("$VENV/bin/jax-agent-rl")
check kernels 120 "${JAX_AGENT_RL[@]}" certify --only kernels --out "$FOLDER/kernels"
check kernel_speed 65 "$VENV/bin/python" benchmarks/cuda_kernels.py
check speed 120 "${JAX_AGENT_RL[@]}" certify --only collectives --only peaks --only speed --only memory --out "$FOLDER/speed"
check training 90 "${JAX_AGENT_RL[@]}" certify --only agreement --only training --out "$FOLDER/training"
# vLLM beside the learner: the weights go by CUDA IPC.
check vllm_run 120 ./launch/gpu.sh --no-install trainer.steps=2 "run_dir=$FOLDER/vllm_run"
if [ "$DRY_RUN" = 1 ] || [ "$(gpus)" -gt 1 ]; then
  # On GPUs of their own: the weights go by NCCL.
  check nccl_run 80 ./launch/gpu.sh --no-install trainer.steps=2 rollout.weight_transport=broadcast \
    "run_dir=$FOLDER/nccl_run"
fi

if [ "${#FAILED[@]}" -gt 0 ]; then
  say "not as it should be: ${FAILED[*]}; $FOLDER has the messages and certify's reports"
  exit 1
fi
say "all as it should be; $FOLDER has certify's reports"
