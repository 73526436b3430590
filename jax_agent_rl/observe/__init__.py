"""Observation of a run: files, console, warnings, trackers, traces, report.

``run_dir`` files of the run folder · ``progress`` live display · ``warnings`` their table and its
evaluation · ``sinks`` TensorBoard, W&B, MLflow, Prometheus and others · ``selection`` filters and
samples of trajectories · ``view`` trajectories in the terminal · ``report`` HTML page
"""
