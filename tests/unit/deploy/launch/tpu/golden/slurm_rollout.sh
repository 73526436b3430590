#!/usr/bin/env bash
# one slice of v5p:2x2x2 (v5p-16, on demand), as a Slurm job.
# Rendered by ./launch/tpu_pod.sh --render slurm. Submit it from the project's folder, which all nodes share, after
# ./launch/tpu_environment.sh there:  sbatch --partition=P FILE
#SBATCH --job-name=my-run
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail
export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}" PYTHONUNBUFFERED=1
export PATH="${JAX_AGENT_RL_VENV:-$PWD/.venv-tpu}/bin:$PATH"

# Sampling: the last nodes, 1 of them, a server on each. The others ask them with a secret of this job.
JAX_AGENT_RL_TOKEN="$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')"
export JAX_AGENT_RL_TOKEN
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)
urls="$(printf ',http://%s:PORT' "${hosts[@]}")"
urls="${urls:1}"
srun --label --kill-on-bad-exit=1 --nodes=1 --ntasks=1 --relative=2 jax-agent-rl rollout-server --config my.yaml --host=0.0.0.0 --port=PORT seed=1 rollout.token_env=JAX_AGENT_RL_TOKEN rollout.weight_dir=gs://b/my-run/weights &
serving=$!
trap 'kill "$serving" 2>/dev/null || true' EXIT
for host in "${hosts[@]}"; do # until it has loaded and compiled
  until (: > "/dev/tcp/$host/PORT") 2>/dev/null; do
    kill -0 "$serving" # or its lines above say why
    sleep 2
  done
done

# Two minutes before the time is over the run saves and ends. Slurm does not put such a job into its queue again by
# itself; from there it goes on from its newest checkpoint.
over=""
trap 'over=1; kill -TERM "$!" || true' USR1

# The processes find each other by Slurm's variables.
srun --label --kill-on-bad-exit=1 --nodes=2 --ntasks=2 --relative=0 jax-agent-rl train my.yaml seed=1 run_dir=runs/my-run rollout.backend=remote 'rollout.urls=['"$urls"']' rollout.token_env=JAX_AGENT_RL_TOKEN rollout.weight_transport=tensorstore rollout.weight_dir=gs://b/my-run/weights learner.multihost.coordinator=auto trainer.checkpoint_dir=gs://b/my-run/checkpoints --auto-resume &
status=0
wait "$!" || status=$?
while [ "$status" = 138 ]; do # 128 and USR1: the wait has ended, the run has not
  status=0
  wait "$!" || status=$?
done
if [ -n "$over" ] && [ "$status" != 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
