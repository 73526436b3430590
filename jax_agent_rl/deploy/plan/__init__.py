"""``jax-agent-rl plan``: a run's programs compiled for a TPU slice, which need not be at hand.

``command`` the command, and the compiler's process · ``topology`` slices and layouts · ``architectures`` well-known
models · ``programs`` the inventory of a run · ``compiled`` memory, work and time of a program, ``collectives``
exchanges in it · ``plan`` whether the run fits, and the time of a step · ``report`` tables and advice · ``search`` for
other layouts.
"""
