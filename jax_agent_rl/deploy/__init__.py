"""Before and around a run: ``plan`` for TPU slices, ``doctor`` checks, ``launch`` starts runs on GPU hosts and TPUs."""
