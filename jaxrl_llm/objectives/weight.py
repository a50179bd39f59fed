"""The effective gradient weight of any objective: how much of the plain policy gradient a token keeps."""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.objectives.inputs import LossInputs, divide, sanitize
from jaxrl_llm.objectives.loss import PolicyLoss


def effective_weight(
    loss: PolicyLoss, logprobs: chex.Array, behavior_logprobs: chex.Array, advantages: chex.Array, **views: chex.Array
) -> jax.Array:
    """w such that the token's gradient is -A r w grad log pi, by autodiff of the per-token loss.

    1 is the plain importance-weighted gradient, 0 a masked or saturated token, below 0 a token that is pulled back.

    Args:
      loss: an objective from `build`; its corrections, penalties and aggregation are left out.
      logprobs, behavior_logprobs, advantages: float [B, T]; `behavior_logprobs` also stands for the old policy.
      **views: further fields of `LossInputs`, for objectives on top-K views.

    Returns:
      float [B, T]; 0 where A = 0.
    """
    chex.assert_equal_shape([logprobs, behavior_logprobs, advantages])
    mask = jnp.ones(logprobs.shape, bool)

    def total(x):
        inputs = LossInputs(x, behavior_logprobs, advantages, mask, old_logprobs=behavior_logprobs, **views)
        t = sanitize(inputs, loss.anchor)
        return jnp.sum(loss.token_loss(t).loss), t.ratio

    gradient, ratio = jax.grad(total, has_aux=True)(jnp.asarray(logprobs))
    scale = -advantages * ratio
    return divide(gradient * jnp.sign(scale), jnp.abs(scale))
