# The image of a TPU host: the project in /app, its programs on PATH; launch/tpu_pod.sh --render gke wants one.
#   docker build -f docker/tpu.Dockerfile -t jax_agent_rl:tpu .
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ENV JAX_AGENT_RL_VENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# Gigabytes are installed only when one of these changes; the code comes after them, and is used where it lies.
COPY pyproject.toml README.md LICENSE ./
COPY third_party third_party
COPY launch launch
COPY jax_agent_rl/__init__.py jax_agent_rl/
COPY gpu_backend/__init__.py gpu_backend/
RUN ./launch/tpu_environment.sh

COPY jax_agent_rl jax_agent_rl
COPY gpu_backend gpu_backend
COPY configs configs
COPY examples examples
CMD ["jax-agent-rl", "--help"]
