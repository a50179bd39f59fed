"""Output-reset margins: a one-sided quadratic on the log-ratio, once continuously differentiable at its margin.

A token with A != 0 is asked to move its log-ratio rho by alpha in the direction of the advantage's sign s; once there,
its residual and gradient are zero and arrive there continuously, unlike PPO's clip. It saturates single tokens; it is no
bound on the policy's cumulative drift (paper: "OR Else: A Differentiable Trust Region for Policy Optimization").
"""

import jax.numpy as jnp

from jaxrl_llm.objectives.inputs import TokenLoss, Tokens


def output_reset(t: Tokens, *, alpha: float = 0.2, weight_by_advantage: bool = False) -> TokenLoss:
    """max(0, alpha - s rho)^2 [B, T], rho = log pi - log pi_old, s = sign(A), and 0 where A = 0 ("OR Else").

    Choose it for several updates on one rollout where PPO's kink makes them unsteady.

    Args:
      t: tokens.
      alpha: margin in nats; the paper gives no value, 0.1 to 0.5 are worth trying.
      weight_by_advantage: multiply by abs(A); the paper does not.
    """
    sign = jnp.sign(t.advantages)
    residual = jnp.where(sign != 0, jnp.maximum(alpha - sign * t.log_ratio, 0.0), 0.0)
    loss = residual**2 * (jnp.abs(t.advantages) if weight_by_advantage else 1.0)
    return TokenLoss(
        loss,
        kept=residual > 0,
        metrics={"or/residual": residual, "or/overshoot": sign * t.log_ratio > alpha, "or/drift": jnp.abs(t.log_ratio)},
    )
