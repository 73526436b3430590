"""What a run would need on a TPU slice: its programs compiled for that slice, without one at hand.

``command`` the command line's part · ``compile_subprocess`` a plan in a process of its own · ``plan`` the plan, and
whether it fits · ``topology`` chips and slices · ``layouts`` devices, meshes and batch sizes · ``inventory`` programs
and resident arrays, of ``learner_programs`` and ``engine_programs`` · ``compiled`` memory and work, ``collectives``
exchanges · ``roofline`` times · ``report`` tables, ``advice`` what to change · ``estimate`` and ``search`` other
layouts · ``architectures`` well-known models.
"""
