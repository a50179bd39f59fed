"""Penalties added to an objective's per-token loss: KL to a frozen reference policy, and an entropy bonus.

Schulman's estimators of KL(pi || reference) from one sample, with x = log reference - log pi:
k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x. As a loss, k1 is refused: its gradient has mean zero whatever the distance, so it
only adds noise; put it into the reward instead.
"""

import dataclasses
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import schema
from jaxrl_llm.objectives.inputs import Tokens, bounded_difference, exp_excess

Estimator = Literal["k1", "k2", "k3", "low_variance"]


@dataclasses.dataclass(frozen=True)
class Penalty:
    """Coefficients; 0 leaves a term out of the program.

    Attributes:
      kl: coefficient of the reference KL.
      kl_estimator: "k2", "k3", or "low_variance" (k3 bounded to [-10, 10]).
      entropy: coefficient of the entropy bonus (subtracted from the loss).
    """

    kl: float = 0.0
    kl_estimator: Literal["k2", "k3", "low_variance"] = "k3"
    entropy: float = 0.0

    def __post_init__(self):
        schema.require(self.kl >= 0, "penalty.kl", self.kl, "0 or more")

    @property
    def needs(self) -> frozenset[str]:
        """Statistics beyond the log-probs."""
        return frozenset({"reference_logprobs"} if self.kl else set()) | frozenset(
            {"entropy"} if self.entropy else set()
        )


def apply(penalty: Penalty, t: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The penalties' sum [B, T], differentiable, and their values [B, T] by name."""
    total, values = jnp.zeros_like(t.logprobs), {}
    if penalty.kl:
        reference = jnp.where(t.mask, t.raw.reference_logprobs, 0.0)
        values["penalty/reference_kl"] = kl_estimate(t.logprobs, reference, penalty.kl_estimator)
        scale = 1.0 if t.raw.kl_scale is None else t.raw.kl_scale[:, None]
        total = total + penalty.kl * scale * values["penalty/reference_kl"]
    if penalty.entropy:
        total = total - penalty.entropy * jnp.where(t.mask, t.raw.entropy, 0.0)
    return total, values


def kl_estimate(logprobs: chex.Array, reference_logprobs: chex.Array, estimator: Estimator) -> jax.Array:
    """Per-token estimate of KL(pi || reference) in nats at tokens drawn from pi.

    Args:
      logprobs, reference_logprobs: float [...], of the sampled token.
      estimator: see the module docstring.

    Returns:
      float [...]; finite for any log-ratio, as is its gradient.

    Raises:
      ValueError: unknown estimator.
    """
    chex.assert_equal_shape([logprobs, reference_logprobs])
    x = bounded_difference(jax.lax.stop_gradient(reference_logprobs), logprobs)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x**2 / 2
    if estimator in ("k3", "low_variance"):
        value = exp_excess(x)
        return jnp.clip(value, -10.0, 10.0) if estimator == "low_variance" else value
    raise ValueError(f"unknown KL estimator {estimator!r}; choose from: k1, k2, k3, low_variance")
