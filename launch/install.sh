#!/usr/bin/env bash
# Adds extras of the package to an environment that a launcher made, in the versions of its lock; without extras, installs
# what the package lacks. Safe to run again.
#   ./launch/install.sh [--dry-run] [EXTRA…]
# Environment: JAX_AGENT_RL_VENV (default .venv), PYTHON, as in lib.sh.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_or_go_on "${BASH_SOURCE[0]}" "$@"

if [ "${1:-}" = "--dry-run" ]; then
  DRY_RUN=1
  shift
fi
extras="$(IFS=, && echo "$*")"

# Environments for accelerators and vLLM have locks of their own, and the extras harbor and verifiers pin other versions.
for name in gpu tpu vllm-cpu; do
  if compgen -G "$VENV/.jax_agent_rl.*$name.stamp" >/dev/null; then LOCK="$ROOT/third_party/locks/$name.txt"; fi
done
case ",$extras," in
  *,harbor,*) LOCK="$ROOT/third_party/locks/harbor.txt" ;;
  *,verifiers,*) LOCK="$ROOT/third_party/locks/verifiers.txt" ;;
  *,inspect,*) LOCK="$ROOT/third_party/locks/inspect.txt" ;;
esac

run rm -f "$VENV/.jax_agent_rl.${extras:-core}.stamp" # something may have been removed since
make_environment "$extras"
