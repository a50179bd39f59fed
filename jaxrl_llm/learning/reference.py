"""KL to the policy that RL began with, as part of the reward, and coefficients that follow a target."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import processes


def token_costs(
    mask: chex.Array, logprobs: chex.Array, reference_logprobs: chex.Array, coefficient: float
) -> jax.Array:
    """coefficient (log pi - log reference) (k1), to be taken from each token's reward.

    In the reward k1 is the right estimator: its expectation is the KL, and so the policy gradient of it is the KL's.

    Args:
      mask: bool [B, T].
      logprobs, reference_logprobs: float [B, T], of the sampled tokens.
      coefficient: reward that a nat costs.

    Returns:
      float [B, T], 0 outside the mask.
    """
    chex.assert_equal_shape([mask, logprobs, reference_logprobs])
    return coefficient * jnp.where(mask, logprobs - reference_logprobs, 0.0)


def kl_per_token(logprobs: chex.Array, reference_logprobs: chex.Array, mask: chex.Array) -> float:
    """Mean k1 over the mask, in nats."""
    logprobs, reference, mask = processes.fetch((logprobs, reference_logprobs, mask))
    return float((logprobs - reference)[mask].mean()) if mask.any() else 0.0


def steer(scale: float, kl: float, target: float, rate: float) -> float:
    """The next factor on the KL coefficients: up where `kl` is above `target`, down where below (Ziegler 2019, sec. 2.2).

    The relative error is bounded to 20 %, at which the factor changes by `rate`.
    """
    if target == 0:
        return scale
    error = min(max(kl / target - 1, -0.2), 0.2) / 0.2
    return scale * (1 + rate * error)
