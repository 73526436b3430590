# shellcheck shell=bash
# The environment of agent `harbor`, beside the project's own: Harbor needs Python 3.12, and asks for other versions of a
# few packages. Source it after lib.sh; do not run it. Environment: JAX_AGENT_RL_HARBOR_VENV (default .venv-harbor).

HARBOR_VENV="${JAX_AGENT_RL_HARBOR_VENV:-$ROOT/.venv-harbor}"

# find_harbor_python: prints the first Python that Harbor runs on; fails where there is none.
find_harbor_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.12 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python3; do
    if usable_python "$candidate" && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# make_harbor_environment PYTHON [EXTRAS]: creates or updates $HARBOR_VENV; instant when nothing changed.
make_harbor_environment() {
  say "Harbor: an environment of its own (about 1 GB; a quarter of a minute the first time)"
  PYTHON="$1" VENV="$HARBOR_VENV" LOCK="$ROOT/third_party/locks/harbor.txt" make_environment "${2:-harbor}"
}
