#!/usr/bin/env bash
# Trains the quickstart agent on this machine: environment, model, data, training. Safe to run again.
#   ./launch/local.sh [--dry-run] [key.path=value …] [--resume]
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_or_go_on "${BASH_SOURCE[0]}" "$@"
cd "$ROOT"

if [ "${1:-}" = "--dry-run" ]; then
  DRY_RUN=1
  shift
fi

make_environment
export JAX_AGENT_RL_ENVIRONMENT_SECONDS="$SECONDS" # so far; the breakdown at the end begins with it
# XLA allocates a program's temporaries anew each time it runs: gigabytes in a learner step, which the system first has
# to clear. Keeping freed memory, in huge pages (glibc 2.35 or newer), took the learner of benchmarks/learner_profile.py
# from 77 to 84 % of sgemm on two AVX2 cores.
KEEP_MEMORY=glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-$KEEP_MEMORY}"
run "$VENV/bin/jax-agent-rl" quickstart "$@"
