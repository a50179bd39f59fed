"""Corrections for the mismatch between sampler and trainer, composed with any objective as a constant weight per token.

Truncated importance weights (TIS), the masked band (MIS / IcePop) and the rejection of whole sequences by their largest
token divergence (trust-region masking, arXiv 2512.23075). They weigh a token's loss; rejected tokens stay in the
denominator unless the aggregation says "kept".
"""

import dataclasses
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import schema
from jaxrl_llm.objectives import divergence as dv
from jaxrl_llm.objectives.inputs import LOG_RATIO_BOUND, Tokens, bounded_difference, divide
from jaxrl_llm.objectives.mask import DppoDivergence, view_of

Level = Literal["token", "sequence_product", "sequence_geometric"]


@dataclasses.dataclass(frozen=True)
class Correction:
    """Which corrections apply.

    Attributes:
      weight: "none"; "tis" weighs by min(pi_old / mu, high); "mis" weighs by pi_old / mu inside [low, high] and by 0
        outside (IcePop's band). Both imply the ratio over pi_old: the anchor's default becomes "old", and "behavior" is
        refused, since pi / mu holds the mismatch already.
      level: whose ratio: the token's, or the whole sequence's as a product or as a geometric mean of token ratios.
      low, high: band.
      sequence_delta: reject sequences in which some token's divergence D(mu, pi) exceeds this; 0 for none.
      sequence_divergence: that divergence.
    """

    weight: Literal["none", "tis", "mis"] = "none"
    level: Level = "token"
    low: float = 0.5
    high: float = 2.0
    sequence_delta: float = 0.0
    sequence_divergence: DppoDivergence = "binary_kl"

    def __post_init__(self):
        schema.require(0 <= self.low <= self.high, "correction.low", self.low, f"in [0, high = {self.high}]")
        schema.require(self.sequence_delta >= 0, "correction.sequence_delta", self.sequence_delta, "0 or more")

    @property
    def needs(self) -> frozenset[str]:
        """Statistics beyond the log-probs."""
        needs = {"old_logprobs"} if self.weight != "none" else set()
        if self.sequence_delta > 0 and self.sequence_divergence.startswith("topk"):
            needs.add("topk_logprobs")
        return frozenset(needs)


def apply(correction: Correction, t: Tokens) -> tuple[jax.Array, jax.Array]:
    """Constant weights [B, T] and bool [B, T], False where a correction rejects the token."""
    weights, kept = jnp.ones_like(t.ratio), jnp.ones_like(t.mask)
    if correction.weight != "none":
        old = jnp.where(t.mask, t.raw.old_logprobs, 0.0)
        ratio = importance_ratio(old, t.behavior_logprobs, t.mask, correction.level)
        inside = (ratio >= correction.low) & (ratio <= correction.high)
        if correction.weight == "tis":
            weights = jnp.minimum(ratio, correction.high)
        else:
            weights, kept = jnp.where(inside, ratio, 0.0), inside
    if correction.sequence_delta > 0:
        view_name, kind = correction.sequence_divergence.split("_")
        view = view_of(t, "binary" if view_name == "binary" else "topk_aggregated")
        d = dv.divergence(view, dv.DIVERGENCES[kind])
        trusted = sequence_mask(d, t.mask, correction.sequence_delta)[:, None]
        weights, kept = jnp.where(trusted, weights, 0.0), kept & trusted
    return jax.lax.stop_gradient(weights), kept


def importance_ratio(logprobs: chex.Array, behavior_logprobs: chex.Array, mask: chex.Array, level: Level) -> jax.Array:
    """exp of the log-ratio of each token, or of its sequence's sum or mean of log-ratios; float [B, T].

    Over 2,000 tokens of log-ratio 0.001 the product is e^2 and the geometric mean e^0.001.

    Raises:
      ValueError: unknown level.
    """
    chex.assert_equal_shape([logprobs, behavior_logprobs, mask])
    log_ratio = jnp.where(mask, bounded_difference(logprobs, behavior_logprobs), 0.0)
    total = jnp.sum(log_ratio, axis=-1, keepdims=True)
    count = jnp.sum(mask, axis=-1, keepdims=True).astype(log_ratio.dtype)
    if level == "sequence_product":
        log_ratio = jnp.broadcast_to(total, log_ratio.shape)
    elif level == "sequence_geometric":
        log_ratio = jnp.broadcast_to(divide(total, count), log_ratio.shape)
    elif level != "token":
        raise ValueError(
            f"unknown correction.level {level!r}; choose from: token, sequence_product, sequence_geometric"
        )
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def sequence_mask(divergences: chex.Array, mask: chex.Array, delta: float) -> jax.Array:
    """bool [B]: no counted token of the sequence has a divergence above delta (arXiv 2512.23075)."""
    chex.assert_equal_shape([divergences, mask])
    return jnp.max(jnp.where(mask, divergences, 0.0), axis=-1) <= delta
