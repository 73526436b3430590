"""Trials of Harbor as trajectories: ``agent_name: harbor``, with the extra ``harbor``.

- ``agent``: the agent loop.
- ``trial``: a trial of Harbor with the endpoint as its model, and what its result says.
- ``environment``: this project's sandbox as an environment of Harbor.

Only the last two import Harbor.
"""
