#!/usr/bin/env bash
# one slice of v5e:4x4 (v5litepod-16, on demand), as a Slurm job.
# Rendered by ./launch/tpu_pod.sh --render slurm. Submit it from the project's folder, which all nodes share, after
# ./launch/tpu_environment.sh there:  sbatch --partition=P FILE
#SBATCH --job-name=my-run
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail
export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}" PYTHONUNBUFFERED=1
export PATH="${JAX_AGENT_RL_VENV:-$PWD/.venv-tpu}/bin:$PATH"

# once, for all nodes share the folder
srun --nodes=1 --ntasks=1 bash -c 'echo '"'"'a b'"'"''

# Two minutes before the time is over the run saves and ends. Slurm does not put such a job into its queue again by
# itself; from there it goes on from its newest checkpoint.
over=""
trap 'over=1; kill -TERM "$!" || true' USR1

# The processes find each other by Slurm's variables.
srun --label --kill-on-bad-exit=1 jax-agent-rl train my.yaml seed=1 run_dir=runs/my-run learner.multihost.coordinator=auto --auto-resume &
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
