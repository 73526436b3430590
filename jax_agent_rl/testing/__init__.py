"""Tests for users, and fakes.

``conformance`` holds an engine to the protocol · ``chaos`` injects faults into a small real system
· ``simulate`` runs the real trainers in virtual time · ``fakes`` engines and a learner · ``leaks``
what a run must not leave behind.
"""
