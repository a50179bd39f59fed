"""Output-reset margins: a one-sided quadratic on the log-ratio, once continuously differentiable at its margin.

A token with A != 0 is asked to move its log-ratio rho by alpha in the direction of the advantage's sign s; once there,
its residual and gradient are zero and arrive there continuously, unlike PPO's clip. It saturates single tokens; it is no
bound on the policy's cumulative drift (paper: "OR Else: A Differentiable Trust Region for Policy Optimization").
"""

import chex
import jax.numpy as jnp

from jaxrl_llm.objectives.inputs import Metric, TokenLoss, Tokens, bounded_difference, masked_mean


def output_reset(t: Tokens, *, alpha: float = 0.2, weight_by_advantage: bool = False) -> TokenLoss:
    """max(0, alpha - s rho)^2 [B, T], rho = log pi - log pi_old, s = sign(A), and 0 where A = 0 ("OR Else").

    Choose it for several updates on one rollout where PPO's kink makes them unsteady.

    Args:
      t: tokens.
      alpha: margin in nats; the paper gives no value, 0.1 to 0.5 are worth trying.
      weight_by_advantage: multiply by abs(A); the paper does not.
    """
    sign = jnp.sign(t.advantages)
    residual = _residual(sign, t.log_ratio, alpha)
    loss = residual**2 * (jnp.abs(t.advantages) if weight_by_advantage else 1.0)
    return TokenLoss(
        loss,
        kept=residual > 0,
        metrics={"or/residual": residual, "or/overshoot": sign * t.log_ratio > alpha, "or/drift": jnp.abs(t.log_ratio)},
    )


def margin_diagnostics(
    logprobs: chex.Array, behavior_logprobs: chex.Array, advantages: chex.Array, mask: chex.Array, alpha: float
) -> dict[str, Metric]:
    """The paper's diagnostics of where a policy stands after its updates, for any objective.

    Args:
      logprobs, behavior_logprobs: float [B, T], of the sampled tokens under the current policy and the sampler.
      advantages: float [B, T]; tokens with A = 0 have no direction and are left out of residual, loss and overshoot.
      mask: bool [B, T].
      alpha: margin in nats.

    Returns:
      after/residual, the mean of max(0, alpha - s rho); after/margin_loss, that of its square; after/overshoot, the
      share with s rho > alpha; after/drift, the mean of abs(rho).
    """
    chex.assert_equal_shape([logprobs, behavior_logprobs, advantages, mask])
    rho = jnp.where(mask, bounded_difference(logprobs, behavior_logprobs), 0.0)
    rho = jnp.where(jnp.isnan(rho), 0.0, rho)  # the sampler's log-prob is missing
    sign = jnp.sign(jnp.where(mask, advantages, 0.0))
    residual, directed = _residual(sign, rho, alpha), mask & (sign != 0)
    return {
        "after/residual": masked_mean(residual, directed),
        "after/margin_loss": masked_mean(residual**2, directed),
        "after/overshoot": masked_mean(sign * rho > alpha, directed),
        "after/drift": masked_mean(jnp.abs(rho), mask),
    }


def _residual(sign, log_ratio, alpha):
    return jnp.where(sign != 0, jnp.maximum(alpha - sign * log_ratio, 0.0), 0.0)
