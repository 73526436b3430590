"""``jax-agent-rl plan``: a run's programs compiled for a TPU slice, which need not be at hand.

``command`` the command, and the compiler's process · ``topology`` slices and layouts ·
``architectures`` well-known models · ``learner_programs, engine_programs`` what a run compiles ·
``compiled`` programs, and memory, time and profile of each, by its text (``hlo``) and the
``prediction`` · ``plan`` whether the run fits, and the time of a step · ``report`` tables and
advice · ``search`` for other layouts.
"""
