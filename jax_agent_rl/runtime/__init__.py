"""How a run is put together: engines, agents and learner from a configuration, on all its hosts.

``train`` a whole run · ``resume`` which run goes on, and what may change · ``identity`` what a run
is of · ``build`` its components · ``rollouts`` and ``scoring`` the half without a learner ·
``teachers`` and ``served_teachers`` of distillation · ``engines`` and ``placement`` which engines
sample, and where · ``ray_cluster`` · ``transports`` how weights reach them · ``multihost`` and
``multihost_engines`` several processes · ``policy_choice`` and ``policy`` which weights a command
uses · ``serve`` · ``diagnosis`` · ``compilation_cache``.
"""
