"""``./launch/tpu_pod.sh``: training on one Cloud TPU slice, from creating to deleting it.

The same run can be a scheduler's job. Reading order: ``__main__`` (the command line), ``gcloud``
(names of slices, the client and its errors), ``job`` (the calls for a host; SkyPilot, GKE and
Slurm), ``launch`` (the whole run). On a host, ``launch/tpu_host.sh`` keeps a run that outlives its
launcher.
"""
