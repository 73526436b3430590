"""``./launch/tpu_pod.sh``: training on Cloud TPU slices, from making them to giving them back.

Reading order: ``__main__`` (the command line), ``topology`` (``v5e:4x4`` in gcloud's words), ``gcloud`` (what is said
to it, what its errors mean), ``slices`` (made, waited for, looked after), ``fleet`` (several of them), ``giving_back``
(by name), ``job`` (the commands on the hosts), ``campaign`` (all of it, through preemptions), ``patience`` (with a
network that fails), ``remote`` (on a host: a run that outlives its launcher), ``logs``, ``dry_run``, ``archive`` (the
code in one file), ``render`` (the same for GKE and Slurm).
"""
