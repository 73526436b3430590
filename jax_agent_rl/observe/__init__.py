"""What a run shows of itself.

``metrics`` the run folder · ``progress`` the live display · ``warnings`` and ``watch`` what goes wrong ·
``sinks`` TensorBoard, W&B, MLflow and others · ``prometheus`` · ``selection`` filters and samples of trajectories ·
``trajectories``, ``trees`` and ``view`` in the terminal · ``report`` the HTML page.
"""
