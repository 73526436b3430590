"""``jax-agent-rl plan``: a run's programs compiled for a TPU slice, which need not be at hand.

``command`` the command, and the compiler's process · ``topology`` slices and layouts · ``architectures`` well-known
models · ``programs`` the inventory of a run · ``micro_batches`` the largest ones · ``compiled`` memory, work and time
of a program, by its text (``hlo``) and the ``prediction`` · ``plan`` whether the run fits, and the time of a step ·
``report`` and ``profile`` tables and advice · ``search`` for other layouts.
"""
