"""The trainers, and the parts of a run that they drive.

Start with ``base``: the training step that all trainers share, and the run around it.

- ``sync``, ``asynchronous``: the trainers. They differ in when groups are rolled out and when
  weights are published.
- ``step``: the groups of a step, and Ctrl-C during its update.
- ``agreement``: engine and learner are compared in every step.
- ``components``: what a trainer drives.
- ``record``, ``observing``: progress and metrics, how they are reported, and where time goes.
"""
