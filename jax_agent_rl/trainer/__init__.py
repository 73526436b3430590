"""The algorithm, top to bottom.

``base`` the training step that all trainers share · ``sync`` and ``asynchronous`` the trainers · ``step`` a step in
progress, and Ctrl-C during its update · ``components`` the parts a trainer drives · ``groups`` sampling and collecting
a step's groups · ``agreement`` engine and learner compared in every step · ``record``, ``observing``, ``timing``
progress and metrics, how they are reported, where time goes.
"""
