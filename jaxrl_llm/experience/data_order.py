"""Which examples come next: a pure function of seed and position, so that resuming needs one integer."""

import numpy as np


def example_indices(seed: int, position: int, count: int, size: int) -> np.ndarray:
    """Indices of the examples at positions `position .. position + count - 1` of an endless shuffled stream.

    Every epoch of `size` positions is its own permutation, so each example is seen exactly once an epoch.

    Args:
      seed: of the run.
      position: examples drawn before.
      count: how many are wanted.
      size: examples in the data set.

    Returns:
      int64 [count].
    """
    if size < 1:
        raise ValueError("the training data is empty; there is no prompt to draw")
    positions = np.arange(position, position + count)
    epochs = positions // size
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(size) for epoch in np.unique(epochs).tolist()}
    return np.array([orders[epoch][p % size] for epoch, p in zip(epochs.tolist(), positions, strict=True)], np.int64)
