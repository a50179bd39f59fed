"""From per-token losses to one number: a numerator and a denominator, divided once for the whole optimizer step.

No function here returns a mean. A batch may be cut into micro-batches, shards or packed rows at will: add the parts'
numerators and denominators, then divide, and value and gradient are those of the whole.
"""

from typing import Literal

import chex
import jax.numpy as jnp

from jaxrl_llm.objectives.inputs import divide

Mode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"]
MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant")


def aggregate(values: chex.Array, mask: chex.Array, mode: Mode, horizon: int = 1) -> tuple[chex.Array, chex.Array]:
    """Numerator and denominator of the aggregated loss.

    token_mean: one mean over all counted tokens. seq_mean_token_mean: each sequence's mean, then the mean of sequences
    (GRPO). seq_mean_token_sum: each sequence's sum, then the mean. seq_sum_constant: each sequence's sum over a fixed
    horizon, then the mean (Dr. GRPO, arXiv 2503.20783). Sequences without a counted token are not counted.

    Args:
      values: float [B, T]; anything where masked.
      mask: bool [B, T], what is counted.
      mode: one of `MODES`.
      horizon: tokens that seq_sum_constant divides by.

    Returns:
      Two scalars.

    Raises:
      ValueError: unknown mode.
    """
    chex.assert_rank([values, mask], 2)
    chex.assert_equal_shape([values, mask])
    values = jnp.where(mask, values, 0.0)
    lengths = jnp.sum(mask, axis=-1).astype(values.dtype)
    sequences = jnp.sum(lengths > 0).astype(values.dtype)
    if mode == "token_mean":
        return jnp.sum(values), jnp.sum(lengths)
    sums = jnp.sum(values, axis=-1)
    if mode == "seq_mean_token_mean":
        return jnp.sum(divide(sums, lengths)), sequences
    if mode == "seq_mean_token_sum":
        return jnp.sum(sums), sequences
    if mode == "seq_sum_constant":
        return jnp.sum(sums) / horizon, sequences
    raise ValueError(f"unknown aggregation {mode!r}; choose from: {', '.join(MODES)}")
