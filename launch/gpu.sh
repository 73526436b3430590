#!/usr/bin/env bash
# Trains with vLLM engines and a JAX learner, as a Ray job: on this machine's GPUs, or on the cluster of RAY_ADDRESS.
#   ./launch/gpu.sh [--dry-run] [--config FILE] [--resume] [key.path=value …]      (--help tells all)
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

arguments=" $* "
device=cuda folder=.venv-gpu
case "$arguments" in *" --device cpu "* | *" --device=cpu "*) device=cpu folder=.venv-vllm ;; esac
export JAX_AGENT_RL_VENV="${JAX_AGENT_RL_VENV:-$ROOT/$folder}"
program() { "$JAX_AGENT_RL_VENV/bin/$1" "${@:2}"; }

case "$arguments" in
  *" --help "* | *" -h "* | *" --dry-run "* | *" --render"* | *" --no-install "*) ;;
  *) "$ROOT/launch/gpu_environment.sh" "$device" ;;
esac
case "$arguments" in
  *" --help "* | *" -h "* | *" --dry-run "* | *" --render"* | *" --config"*) ;;
  *) # the quickstart
    program jax-agent-rl fetch-model
    (cd "$ROOT" && program jax-agent-rl prepare shop --out data/shop)
    ;;
esac
if [ ! -x "$JAX_AGENT_RL_VENV/bin/python" ]; then
  echo "error: there is no environment $JAX_AGENT_RL_VENV yet: make it with ./launch/gpu_environment.sh $device" >&2
  exit 1
fi
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$JAX_AGENT_RL_VENV/bin/python" -m jax_agent_rl.deploy.launch "$@"
