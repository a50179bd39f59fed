"""Planning: a run's real programs compiled ahead of time for TPU slices that are not there."""
