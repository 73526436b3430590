"""Tests for users, and fakes.

::

    conformance    the tests of the engine protocol
    chaos          faults injected into a small real system
    simulate       the real trainers in virtual time
    fakes          engines without a model, and a learner without an optimizer
    leaks          what a run must not leave behind
"""
