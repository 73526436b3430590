#!/usr/bin/env bash
# Trains on a Cloud TPU slice: creates it, trains, stores the run in a bucket, deletes it. Or renders the run as a job of
# SkyPilot, GKE or Slurm, which wait for capacity and survive preemptions.
#   ./launch/tpu_pod.sh --name N --zone Z --topology v5e:4x4 [--bucket gs://B] [--config FILE] [key.path=value …]
# --help lists all options; docs/tpu.md explains the rest.
#
# All hosts write checkpoints to the bucket; host 0 copies metrics and trajectories there every 15 seconds, as every host
# does with its log. The run goes on when this launcher is killed: the same command, or --logs, finds it again. The slice
# is deleted when the run has ended, unless --keep is given or --bucket is missing. A preemption ends the launch: --resume
# continues. A job of --render sky waits for capacity, searches zones and recovers by itself.
#
# --env WANDB_API_KEY takes the value from here; it goes to the hosts through the connection, and is in no command line.
#
# --certify measures the slice with jax-agent-rl certify instead; the report is in runs/NAME on host 0, and in the bucket.
#
# Exit status: the run's; 1 if the slice cannot be created or is preempted, or a host cannot be set up; 2 for a wrong
# command line; 130 after Ctrl-C.
#
# Examples:
#   ./launch/tpu_pod.sh --name try --zone us-west4-a --topology v5e:2x2
#   ./launch/tpu_pod.sh --name try --zone us-west4-a --topology v5e:2x2 --bucket gs://b --certify
#   ./launch/tpu_pod.sh --name big --zone us-east5-a,us-central1-a --topology v5p:4x4x4 --spot --bucket gs://b \
#       --config my.yaml --render sky > big.sky.yaml && sky jobs launch big.sky.yaml
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The launcher needs gcloud and no packages: everything else is installed on the hosts.
python="$(find_python)"
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m jax_agent_rl.deploy.launch.tpu "$@"
