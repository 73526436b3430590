#!/usr/bin/env bash
# Trains on a Cloud TPU slice: creates it, trains, stores the run in a bucket, deletes it. Or renders the run as a job of
# SkyPilot, GKE or Slurm, which wait for capacity and survive preemptions.
#   ./launch/tpu_pod.sh --name N --zone Z --topology v5e:4x4 [--bucket gs://B] [--config FILE] [key.path=value …]
# --help tells all, docs/tpu.md the rest.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The launcher needs gcloud and no packages: everything else is installed on the hosts.
python="$(find_python)"
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m jax_agent_rl.deploy.launch.tpu "$@"
