"""From rewards to advantages. Pure functions of arrays; a missing reward (NaN) is left out of every statistic and gets 0."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.objectives.inputs import divide


def group_advantages(
    rewards: chex.Array, group_ids: chex.Array, num_groups: int, *, normalize_std: bool = True, eps: float = 1e-6
) -> jax.Array:
    """(R - mean_g) / (std_g + eps), std with ddof 1 (GRPO, arXiv 2402.03300); without the division: Dr. GRPO.

    Args:
      rewards: float [B], NaN where the grader failed.
      group_ids: int32 [B], 0 .. num_groups - 1.
      num_groups: static.
      normalize_std: divide by the group's standard deviation.
      eps: added to it.

    Returns:
      float [B]; exactly 0 in groups of one, of equal rewards, and for missing rewards.
    """
    valid, centred, count, members = _centre(rewards, group_ids, num_groups)
    if not normalize_std:
        return jnp.where(valid, centred, 0.0)
    variance = divide(members(centred**2), count - 1)
    return jnp.where(valid, centred / (jnp.sqrt(variance)[group_ids] + eps), 0.0)


def rloo_advantages(rewards: chex.Array, group_ids: chex.Array, num_groups: int) -> jax.Array:
    """R minus the mean of the group's other rewards (RLOO, arXiv 2402.14740). Arguments as `group_advantages`."""
    valid, centred, count, _ = _centre(rewards, group_ids, num_groups)
    return jnp.where(valid, centred * divide(count, count - 1)[group_ids], 0.0)


def reinforce_plus_plus_advantages(rewards: chex.Array, *, eps: float = 1e-6) -> jax.Array:
    """(R - mean) / (std + eps) over the whole batch (REINFORCE++, arXiv 2501.03262), std with ddof 1.

    Args:
      rewards: float [B], NaN where the grader failed.
      eps: added to the standard deviation.
    """
    chex.assert_rank(rewards, 1)
    return group_advantages(rewards, jnp.zeros(rewards.shape, jnp.int32), 1, eps=eps)


def gae(
    rewards: chex.Array,
    values: chex.Array,
    mask: chex.Array,
    bootstrap: chex.Array,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (Schulman 2015, arXiv 1506.02438, eq. 16) on right-padded responses.

    Args:
      rewards: float [B, T], per token.
      values: float [B, T], the critic's value before each token.
      mask: bool [B, T], a prefix of each row.
      bootstrap: float [B], value after the last valid token: the critic's where the response was truncated, 0 where it
        ended.
      gamma: discount.
      lam: trace decay.

    Returns:
      Advantages and returns (advantages + values), float [B, T], 0 outside the mask.
    """
    chex.assert_rank([rewards, values, mask, bootstrap], [2, 2, 2, 1])
    chex.assert_equal_shape([rewards, values, mask])
    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)
    following = jnp.concatenate([mask[:, 1:], jnp.zeros_like(mask[:, :1])], axis=1)
    next_values = jnp.where(following, jnp.roll(values, -1, axis=1), bootstrap[:, None])
    deltas = jnp.where(mask, rewards + gamma * next_values - values, 0.0)

    def back(trace, column):
        delta, valid = column
        trace = jnp.where(valid, delta + gamma * lam * trace, 0.0)
        return trace, trace

    _, advantages = jax.lax.scan(back, jnp.zeros_like(deltas[:, 0]), (deltas.T, mask.T), reverse=True)
    advantages = advantages.T
    return advantages, jnp.where(mask, advantages + values, 0.0)


def terminal_rewards(rewards: chex.Array, mask: chex.Array) -> jax.Array:
    """Places one reward per sequence, float [B], on the last valid token of each row of `mask` bool [B, T]."""
    chex.assert_rank([rewards, mask], [1, 2])
    last = jnp.sum(mask, axis=1) - 1
    here = jnp.arange(mask.shape[1]) == last[:, None]
    return jnp.where(here, rewards[:, None], 0.0)


def _centre(rewards, group_ids, num_groups):
    chex.assert_rank([rewards, group_ids], 1)
    chex.assert_equal_shape([rewards, group_ids])
    valid = ~jnp.isnan(rewards)
    rewards = jnp.where(valid, rewards, 0.0).astype(jnp.promote_types(rewards.dtype, jnp.float32))

    def members(x):
        return jax.ops.segment_sum(jnp.where(valid, x, 0.0), group_ids, num_groups)

    def extreme(reduce, filler):
        return reduce(jnp.where(valid, rewards, filler), group_ids, num_groups)

    count = members(jnp.ones_like(rewards))
    # The rounded mean of equal rewards can differ from them; such a group has advantage exactly 0 all the same.
    flat = extreme(jax.ops.segment_max, -jnp.inf) <= extreme(jax.ops.segment_min, jnp.inf)
    centred = jnp.where(flat[group_ids], 0.0, rewards - divide(members(rewards), count)[group_ids])
    return valid, centred, count, members
