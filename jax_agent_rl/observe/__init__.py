"""Observation of a run: files, console, warnings, trackers, traces, report.

=============  =====================================================================
``run_dir``    the files of the run folder; ``schema`` checks what is read from them
``progress``   live display
``watch``      evaluation of rules on every step; ``warnings`` is the table of rules
``sinks``      TensorBoard, W&B, MLflow, Prometheus and others
``selection``  filters and samples of trajectories
``view``       trajectories in the terminal
``report``     HTML page
=============  =====================================================================
"""
