"""Rollout: how agents reach engines, and how a step's trajectories are collected.

``protocol`` what an engine is · ``server`` one engine · ``client``, ``balancer`` and ``stops`` all of them ·
``collect`` a step's groups · ``accounting`` what became of every trajectory.
``remote`` engines on other machines.
"""
