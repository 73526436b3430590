# shellcheck shell=bash
# The agent harnesses of tests/harnesses, in a folder of their own: third_party/harnesses.txt has their versions.
# Source it after lib.sh and harbor_environment.sh; do not run it. Environment: JAX_AGENT_RL_HARNESSES (default .harnesses).

HARNESSES="${JAX_AGENT_RL_HARNESSES:-$ROOT/.harnesses}"
HARNESS_VERSIONS="$ROOT/third_party/harnesses.txt"

# pinned INSTALLER: the packages that npm, or pip, installs.
pinned() { sed -n "s/^$1 //p" "$HARNESS_VERSIONS"; }

# install_harness_packages PACKAGES…: with uv, as install_locked does, which chooses versions of 200 packages much faster than
# pip. With bytecode: the sandbox, where they are read-only, would compile them in every run.
install_harness_packages() {
  local python="$HARNESSES/python/bin/python"
  if run "$VENV/bin/uv" pip install --quiet --compile-bytecode --python "$python" "$@"; then return; fi
  say "uv could not install them; pip does, which takes longer"
  run "$python" -m pip install --quiet --quiet --progress-bar off --disable-pip-version-check "$@"
}

# make_harnesses: installs them; instant when nothing changed.
make_harnesses() {
  local stamp="$HARNESSES/.stamp" wanted packages python
  wanted="$(cat "$HARNESS_VERSIONS" "${BASH_SOURCE[0]}" | cksum)"
  if [ "$DRY_RUN" = 0 ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    say "harnesses in $HARNESSES are up to date"
    return
  fi
  say "harnesses: $HARNESSES (2.1 GB; a few minutes)"
  if [ "$DRY_RUN" = 0 ]; then need_space 4 "$HARNESSES"; fi
  mapfile -t packages < <(pinned npm)
  run npm install --prefix "$HARNESSES" --no-save --no-audit --no-fund --loglevel error "${packages[@]}"
  if python="$(find_harbor_python)"; then # OpenHands needs 3.12, as Harbor does
    mapfile -t packages < <(pinned pip)
    run "$python" -m venv "$HARNESSES/python"
    install_harness_packages "${packages[@]}"
  else
    say "no Python 3.12 or 3.13: OpenHands and mini-swe-agent are left out"
  fi
  [ "$DRY_RUN" = 1 ] || echo "$wanted" >"$stamp"
}
