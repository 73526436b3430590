#!/usr/bin/env bash
# The environment on a TPU host; tpu_pod.sh runs it on every host. Safe to run again.
#   ./launch/tpu_environment.sh [--dry-run]
# Environment: JAX_AGENT_RL_VENV (default .venv-tpu), PYTHON (default python3.11).
set -euo pipefail
PYTHON="${PYTHON:-python3.11}"
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_or_go_on "${BASH_SOURCE[0]}" "$@"

if [ "${1:-}" = "--dry-run" ]; then DRY_RUN=1; fi

# The VMs come with Ubuntu 22.04 and its Python 3.10. uv brings one of its own builds.
if ! find_python >/dev/null 2>&1; then
  say "installing Python 3.11"
  run python3 -m pip install --quiet --user "uv==$UV_VERSION"
  run "$HOME/.local/bin/uv" python install --quiet 3.11
  if [ "$DRY_RUN" = 0 ]; then PYTHON="$("$HOME/.local/bin/uv" python find 3.11)"; fi
fi
VENV="${JAX_AGENT_RL_VENV:-$ROOT/.venv-tpu}"
LOCK="$ROOT/third_party/locks/tpu.txt"
make_environment tpu
