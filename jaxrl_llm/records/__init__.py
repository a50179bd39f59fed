"""What a run leaves, and how it is read again: metrics, completions, checkpoints, pictures, progress.

In come rows of numbers, states and completions; out go files in the run directory that are whole or absent, and from these the
same values again. Nothing here computes with a model.
"""
