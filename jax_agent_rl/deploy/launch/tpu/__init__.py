"""``./launch/tpu_pod.sh``: training on Cloud TPU slices, from creating to deleting them.

Reading order: ``__main__`` (the command line), ``gcloud`` (topologies, calls and errors), ``slices`` (create, poll,
retry, delete), ``job`` (the commands on the hosts), ``controller`` (the whole run, through preemptions), ``remote``
(on a host: a run that outlives its launcher; its logs here), ``render`` (dry runs, GKE and Slurm).
"""
