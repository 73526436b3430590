"""``jax-agent-rl plan``: a run's programs compiled for a TPU slice, which need not be at hand.

``command`` the command, and the compiler's process · ``topology`` slices and layouts ·
``architectures`` well-known models · ``model_flops`` what models compute ·
``learner_programs, engine_programs`` what a run compiles ·
``compiled`` programs, and memory and time of each, by its text (``hlo``) and the ``prediction`` ·
``answers`` of the compiler, kept for later plans ·
``profiles`` where the time of each goes · ``plan`` whether the run fits, and the time of a step ·
``result`` what leaves the compiler's process · ``report`` tables and advice · ``estimate`` memory
and time without compiling · ``search`` for other layouts.
"""
