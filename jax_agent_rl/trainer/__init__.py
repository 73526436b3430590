"""The algorithm, top to bottom.

``sync``, ``one_step_off`` and ``fully_async`` the trainers · ``base`` the training step they share · ``streaming`` what
the asynchronous ones share · ``components`` the parts a trainer drives · ``groups`` sampling and collecting a step's
groups · ``agreement`` engine and learner compared in every step · ``interruption`` Ctrl-C during an update ·
``record``, ``observing``, ``timing`` bookkeeping, observers, where time goes.
"""
