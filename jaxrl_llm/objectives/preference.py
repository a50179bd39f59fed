"""Learning a scalar reward from comparisons: the Bradley-Terry model of pairwise preferences."""

import chex
import jax


def bradley_terry(chosen: chex.Array, rejected: chex.Array) -> jax.Array:
    """-log sigmoid(chosen - rejected), the negative log-likelihood of each comparison (Ouyang 2022, eq. 1).

    Args:
      chosen, rejected: float [B], scores of the preferred and of the other reply, in nats of preference.

    Returns:
      float [B]; its gradient by `chosen` is sigmoid(chosen - rejected) - 1.
    """
    chex.assert_rank([chosen, rejected], 1)
    chex.assert_equal_shape([chosen, rejected])
    return -jax.nn.log_sigmoid(chosen - rejected)
