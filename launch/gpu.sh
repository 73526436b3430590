#!/usr/bin/env bash
# Trains with vLLM engines and a JAX learner, as a Ray job: on this machine's GPUs, or on the cluster of RAY_ADDRESS.
#   ./launch/gpu.sh [--dry-run] [--config FILE] [--resume] [key.path=value …]      (--help lists all options)
#
# The learner takes learner.multihost.num_processes nodes (one by default) and learner.mesh's devices, the same number on
# each. Every other GPU serves, rollout.vllm.tensor_parallel_size per engine; if too few are left, the engine shares the
# learner's. A configuration that sets rollout.placement decides for itself.
#
# Environment: RAY_ADDRESS (an existing cluster, e.g. http://10.0.0.1:8265; this folder, the configuration, the model and
# run_dir at the same paths on its nodes), JAX_AGENT_RL_VENV (default .venv-gpu, on CPUs .venv-vllm), PYTHON,
# CUDA_VISIBLE_DEVICES (restricts the GPUs of this machine).
#
# Exit status: the learner's; 1 if the launch failed; 2 for a wrong command line; 130 after Ctrl-C.
#
# Examples:
#   ./launch/gpu.sh trainer.steps=20                       the quickstart on this machine's GPUs
#   ./launch/gpu.sh --config my.yaml learner.mesh.fsdp=4 rollout.vllm.tensor_parallel_size=2
#   RAY_ADDRESS=http://10.0.0.1:8265 ./launch/gpu.sh --config my.yaml learner.multihost.num_processes=2
#   ./launch/gpu.sh --render ray --hosts me@10.0.0.1,me@10.0.0.2 >cluster.yaml
#   ./launch/gpu.sh --render kuberay --nodes 2 --config my.yaml run_dir=/runs/my >run.yaml
#   ./launch/gpu.sh --certify                              measures this machine; the report is certify/certify.html
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
  *" --help "* | *" -h "* | *" --dry-run "* | *" --render"* | *" --no-install "*) ;;
  *" --certify "*) program python -m pip install --quiet "pytest>=8.4" ;; # of the conformance suite
esac
case "$arguments" in
  *" --help "* | *" -h "* | *" --dry-run "* | *" --render"* | *" --config"* | *" --certify "*) ;;
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
