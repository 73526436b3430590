"""Before and around a run: ``plan`` for TPU slices, ``doctor`` and ``certify``, ``launch``."""
