#!/usr/bin/env bash
# Trains with vLLM rollout servers and a JAX learner on this machine's GPUs, or on a Ray cluster of CUDA hosts.
#   ./launch/gpu.sh [--dry-run] [--hosts h1,h2,…] [--config FILE] [key.path=value …]      (--help tells all)
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The launcher needs no packages: it makes the environment, and then runs what is in there.
python="$(find_python)"
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m jax_agent_rl.deploy.launch "$@"
