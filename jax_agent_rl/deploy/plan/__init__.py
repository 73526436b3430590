"""What a run would need on a TPU slice: its programs compiled for that slice, without one at hand."""
