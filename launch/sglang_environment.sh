# shellcheck shell=bash
# The environment of rollout.backend=sglang on CPUs: SGLang alone, whose server the project's own environment starts. It
# pins other versions than the project. Source it after lib.sh; do not run it. Environment: JAX_AGENT_RL_SGLANG_VENV
# (default .venv-sglang), SGLANG_PYTHON (default python3.11, for which pip finds a CPU build of torch).
#
# With GPUs: pip install sglang, into an environment of its own, and rollout.sglang.python is its Python.

SGLANG_VENV="${JAX_AGENT_RL_SGLANG_VENV:-$ROOT/.venv-sglang}"
SGLANG_LOCK="$ROOT/third_party/sglang-cpu.txt" # what SGLang's modules import on a CPU; see third_party/sglang.md

# find_sglang_python: the Python of its environment; fails where there is none.
find_sglang_python() {
  local candidate
  for candidate in ${SGLANG_PYTHON:-python3.11 python3.12}; do
    if usable_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# make_sglang_environment PYTHON: creates or updates $SGLANG_VENV; instant when nothing changed.
make_sglang_environment() {
  local stamp="$SGLANG_VENV/.jax_agent_rl.stamp" wanted operators version
  wanted="$(cat "$SGLANG_LOCK" "${BASH_SOURCE[0]}" | cksum)"
  if [ "$DRY_RUN" = 0 ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    say "environment $SGLANG_VENV is up to date"
    return
  fi
  say "SGLang: an environment of its own (about 2 GB; a few minutes the first time)"
  if [ ! -e "$SGLANG_VENV" ]; then need_space 4 "$SGLANG_VENV"; fi
  "$SGLANG_VENV/bin/python" -c 'import pip' 2>/dev/null || run "$1" -m venv "$SGLANG_VENV"
  # SGLang's own list of requirements is that of CUDA: kernels, and builds of torch of several gigabytes.
  version="$(locked torch)"
  VENV="$SGLANG_VENV" pip_install "torch==$version"
  VENV="$SGLANG_VENV" pip_install "uv==$UV_VERSION"
  run "$SGLANG_VENV/bin/uv" pip install --quiet --python "$SGLANG_VENV/bin/python" --no-deps --require-hashes \
    -r "$SGLANG_LOCK"
  # Describing operators that are not there fails: of torchvision, only transforms are used, which are plain torch.
  operators="$(compgen -G "$SGLANG_VENV/lib/python*/site-packages/torchvision/_meta_registrations.py" || true)"
  run truncate --size 0 "${operators:-torchvision/_meta_registrations.py}"
  [ "$DRY_RUN" = 1 ] || echo "$wanted" >"$stamp"
}
