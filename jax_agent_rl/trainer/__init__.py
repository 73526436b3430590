"""The algorithm, top to bottom.

``base`` the training step that all trainers share · ``sync`` and ``asynchronous`` the trainers · ``step`` its
groups, and Ctrl-C during its update · ``components`` the parts a trainer drives · ``agreement`` engine and learner
compared in every step · ``record``, ``observing`` progress and metrics, how they are reported, where time goes.
"""
