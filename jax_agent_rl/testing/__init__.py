"""Tests for users, and fakes.

::

    conformance    the tests of the engine protocol
    simulate       the real trainers in virtual time
    fakes          engines without a model, and a learner without an optimizer
    leaks          what an engine must not leave behind
"""
