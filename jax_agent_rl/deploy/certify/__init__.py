"""Certification: measures a machine and compares it with what the documentation claims.

``command`` runs the checks · ``machine`` the configuration, the devices and a run's parts on them ·
``kernels``, ``speed``, ``system`` the checks · ``report`` what they return, as JSON and HTML.

A check that raises is a result; the other checks still run. With several hosts, each host checks
its own devices; exchanges and the training run are of all hosts together, in the same order
everywhere.
"""
