"""The critic's loss and how well it explains the returns. Masked positions may hold anything, NaN included."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.objectives.inputs import divide


def value_loss(
    values: chex.Array, old_values: chex.Array, returns: chex.Array, mask: chex.Array, *, clip: float = 0.2
) -> jax.Array:
    """Half the squared error, the larger of the plain and the clipped one (PPO's value clipping, Schulman 2017's code).

    Args:
      values: float [B, T], V of the current critic; differentiable.
      old_values: float [B, T], V before this rollout's updates.
      returns: float [B, T], targets.
      mask: bool [B, T].
      clip: `values` may move this far from `old_values` before its gradient stops; 0 for no bound.

    Returns:
      float [B, T], 0 where masked.
    """
    chex.assert_rank([values, old_values, returns, mask], 2)
    chex.assert_equal_shape([values, old_values, returns, mask])
    values, old, target = (jnp.where(mask, x, 0.0) for x in (values, old_values, returns))
    old, target = jax.lax.stop_gradient((old, target))
    error = jnp.square(values - target)
    if clip > 0:
        error = jnp.maximum(error, jnp.square(jnp.clip(values, old - clip, old + clip) - target))
    return 0.5 * error


def explained_variance(values: chex.Array, returns: chex.Array, mask: chex.Array) -> jax.Array:
    """1 - Var(returns - values) / Var(returns) over the mask: 1 perfect, 0 no better than a constant; 0 without variance.

    Args:
      values, returns: float [B, T].
      mask: bool [B, T].

    Returns:
      float [].
    """
    chex.assert_equal_shape([values, returns, mask])
    values, returns = (jnp.where(mask, x, 0.0) for x in (values, returns))
    total = _variance(returns, mask)
    return jnp.where(total > 0, 1 - divide(_variance(returns - values, mask), total), 0.0)


def whiten(advantages: chex.Array, mask: chex.Array, *, eps: float = 1e-8) -> jax.Array:
    """Mean 0 and variance 1 over the mask, 0 outside it, as PPO does with GAE. Float [B, T]."""
    chex.assert_equal_shape([advantages, mask])
    advantages = jnp.where(mask, advantages, 0.0)
    mean = divide(jnp.sum(advantages), jnp.sum(mask))
    return jnp.where(mask, (advantages - mean) * jax.lax.rsqrt(_variance(advantages, mask) + eps), 0.0)


def _variance(x: jax.Array, mask: jax.Array) -> jax.Array:
    count = jnp.sum(mask)
    mean = divide(jnp.sum(jnp.where(mask, x, 0.0)), count)
    return divide(jnp.sum(jnp.where(mask, jnp.square(x - mean), 0.0)), count)
