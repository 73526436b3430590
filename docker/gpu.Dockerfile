# CUDA 13: vLLM and a JAX learner. CUDA's libraries come with the packages, the driver (580 or newer) with the host.
#   docker build -f docker/gpu.Dockerfile -t jax_agent_rl:gpu .
#   docker run --gpus all --ipc=host jax_agent_rl:gpu ./launch/gpu.sh --config configs/quickstart.yaml
FROM python:3.12-slim-bookworm

# Triton compiles its kernels' launchers with the C compiler when they first run; KubeRay probes pods with wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc git libc6-dev wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV JAX_AGENT_RL_VENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# Gigabytes are installed only when one of these changes; the code comes after them, and is used where it lies.
COPY pyproject.toml README.md LICENSE ./
COPY third_party third_party
COPY launch launch
COPY jax_agent_rl/__init__.py jax_agent_rl/
COPY gpu_backend/__init__.py gpu_backend/
RUN ./launch/gpu_environment.sh cuda

COPY jax_agent_rl jax_agent_rl
COPY gpu_backend gpu_backend
COPY configs configs
COPY examples examples
CMD ["jax-agent-rl", "--help"]
