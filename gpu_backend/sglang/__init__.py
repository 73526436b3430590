"""The SGLang rollout backend: the protocol of ``rollout``, over SGLang's own server.

Reading order: ``backend`` (requests, pauses, updates) · ``wire`` (what the server is sent and what
it answers) · ``settings`` and ``process`` (starting a server) · ``cpu_kernels`` (what its CPU build
lacks). Only a run with ``rollout.backend=sglang`` imports this package, and SGLang is never
imported: its server is a process of another Python.
"""
