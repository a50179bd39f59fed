"""Smooth trust regions: a quadratic penalty whose gradient turns back what leaves the region.

Both add to -A r a penalty that makes the gradient's weight 1 at r = 1, 0 on the region's boundary and negative beyond it
(where a mask would only stop). SPO's boundary is a ratio, DRPO's a probability shift abs(pi_k - mu_k), bounded on rare tokens.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.objectives.inputs import TokenLoss, Tokens, exp_excess, extended_exp


def spo(t: Tokens, *, eps: float = 0.2) -> TokenLoss:
    """-A r + abs(A) / (2 eps) (r - 1)^2 [B, T] (SPO, arXiv 2401.16025); weight 1 - sign(A (r - 1)) abs(r - 1) / eps.

    Choose it over PPO's clip where overshooting tokens must come back; on rare tokens its pull grows with the ratio.
    """
    return TokenLoss(-t.advantages * t.ratio + jnp.abs(t.advantages) / (2 * eps) * (t.ratio - 1) ** 2)


def drpo(
    t: Tokens,
    *,
    delta: float = 0.15,
    regularizer: Literal["shift", "chi2", "kl", "tv", "mask"] = "shift",
    advantage_weighted: bool = True,
) -> TokenLoss:
    """-A r + abs(A) / (2 delta) mu_k (r - 1)^2 (DRPO, arXiv 2606.09821); weight 1 - sign(A (r - 1)) abs(pi_k - mu_k) / delta.

    Choose it where gradients should fade towards the boundary rather than stop there, from log-probs alone.
    The paper's released recipe has delta = 12.5, where the boundary is never reached (a shift is at most 1); the
    geometry it argues for needs 0.05 to 0.5.

    Args:
      t: tokens.
      delta: largest shift of the sampled token's probability.
      regularizer: "shift" is DRPO; the rest are the paper's ablations: "chi2" (SPO's form with eps = delta), "kl"
        (abs(A) / delta k3(r)), "tv" (abs(A) / delta abs(pi_k - mu_k)), "mask" (no penalty up to a shift of delta, DRPO's beyond).
      advantage_weighted: False drops abs(A) from the penalty (ablation), so that the boundary moves with the reward's scale.
    """
    scale = (jnp.abs(t.advantages) if advantage_weighted else t.advantages != 0) / delta
    mu = jnp.exp(t.anchor_logprobs)
    quadratic = mu * (t.ratio - 1) ** 2 / 2
    # abs whose derivative at 0 is 0: a token that has not moved is not pushed either way.
    # From pi, not from the bounded ratio: a token of mu below e^-20 can move far as well.
    shift = jax.lax.stop_gradient(jnp.sign(t.ratio - 1)) * (jnp.exp(jnp.minimum(t.logprobs, 0.0)) - mu)
    # k3 goes on beyond the ratio's bound, and the surrogate that it restrains goes with it.
    ratio = extended_exp(t.log_ratio) if regularizer == "kl" else t.ratio
    penalty = {
        "shift": lambda: quadratic,
        "chi2": lambda: (t.ratio - 1) ** 2 / 2,
        "kl": lambda: exp_excess(t.log_ratio),
        "tv": lambda: shift,
        "mask": lambda: jnp.where(shift > delta, quadratic, 0.0),
    }[regularizer]()
    return TokenLoss(
        -t.advantages * ratio + scale * penalty,
        metrics={"divergence/mean": shift, "divergence/outside": shift > delta},
    )
