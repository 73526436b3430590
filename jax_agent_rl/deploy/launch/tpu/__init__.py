"""``./launch/tpu_pod.sh``: training on Cloud TPU slices, from creating to deleting them.

Reading order: ``__main__`` (the command line), ``topology`` (``v5e:4x4`` in gcloud's terms), ``gcloud`` (calls and the
meaning of errors), ``slices`` (create, wait, watch, retry), ``fleet`` (several of them; deletion by name), ``job`` (the
commands on the hosts), ``controller`` (the whole run, through preemptions), ``remote`` (on a host: a run that outlives
its launcher), ``ssh`` (connections), ``logs``, ``dry_run``, ``archive`` (the code in one file), ``render`` (GKE and
Slurm).
"""
