"""Divergence masks: a token outside the trust region keeps its gradient only if the step leads back.

Both rules drop the gradient (M = 0) where D > delta and the step leads outwards; they differ in how they tell:

    DPPO  A (r - 1) > 0     the sampled token's ratio          (arXiv 2602.04879)
    PDM   A D_dot > 0       the divergence's own derivative    (arXiv 2607.10848)

A token exactly on the boundary (D = delta, or D_dot = 0) is kept.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.objectives import divergence as dv
from jaxrl_llm.objectives.inputs import TokenLoss, Tokens, bounded_difference, bounded_exp
from jaxrl_llm.objectives.ratio import surrogate

DppoDivergence = Literal["binary_tv", "binary_kl", "topk_tv", "topk_kl"]
ViewName = Literal["exact", "binary", "topk_aggregated", "topk_uniform"]


def dppo(
    t: Tokens,
    *,
    divergence: DppoDivergence = "topk_kl",
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    topk_set: dv.TopKSet = "union",
    ratio_cap: float = 0.0,
) -> TokenLoss:
    """-M A r [B, T] with the ratio criterion (DPPO, arXiv 2602.04879).

    Choose it over clipping whenever the vocabulary is large: rare tokens may move freely, common ones are held. The binary
    divergences need nothing of the sampler but the log-prob; the top-K ones see the whole distribution's shift.

    Args:
      t: tokens.
      divergence: what D is; the paper uses thresholds of 0.15 to 0.2 with TV, 0.05 with KL.
      delta_low, delta_high: thresholds where A < 0 and where A > 0.
      topk_set: see `divergence.topk_view`.
      ratio_cap: see `ratio.surrogate`; the paper's scaling runs use 5, its code 20; 0 for none.
    """
    view_name, kind = divergence.split("_")
    view = view_of(t, "binary" if view_name == "binary" else "topk_aggregated", topk_set)
    d = dv.divergence(view, dv.DIVERGENCES[kind])
    return _masked(t, d, _ratio_direction(t), delta_low, delta_high, ratio_cap)


def pdm(
    t: Tokens,
    *,
    view: ViewName = "topk_aggregated",
    divergence: Literal["kl", "reverse_kl", "tv", "jensen_shannon", "hellinger", "chi2"] = "kl",
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    topk_set: dv.TopKSet = "union",
    ratio_cap: float = 0.0,
) -> TokenLoss:
    """-M A r [B, T] with the predictive criterion (predictive divergence mask, arXiv 2607.10848).

    Choose it in DPPO's place where the sampler records a top-K view: it asks of each update whether it widens the
    divergence that it is judged by, and differs from DPPO where the sampled token moves one way and the rest another.

    Args:
      t: tokens.
      view: support from which both D and D_dot are computed; "exact" needs a top-K view with K = V.
      divergence: the paper's is KL(mu || pi).
      delta_low, delta_high: thresholds where A < 0 and where A > 0 (0.15; 0.05 in the tight study).
      topk_set: see `divergence.topk_view`.
      ratio_cap: see `ratio.surrogate`; 0 for none.
    """
    seen = view_of(t, view, topk_set)
    d = dv.divergence(seen, dv.DIVERGENCES[divergence])
    d_dot = dv.directional_derivative(seen, dv.DIVERGENCES[divergence])
    loss = _masked(t, d, d_dot, delta_low, delta_high, ratio_cap)
    # How often the two criteria tell different stories, among tokens outside the region.
    outside = d > jnp.where(t.advantages < 0, delta_low, delta_high)
    disagree = outside & ((t.advantages * d_dot > 0) != (t.advantages * _ratio_direction(t) > 0))
    return loss.replace(metrics=loss.metrics | {"mask/criteria_disagree": disagree})


def view_of(t: Tokens, name: ViewName, topk_set: dv.TopKSet = "union") -> dv.View:
    """The pair (mu, pi) at every token as the view `name`.

    Raises:
      ValueError: a top-K or exact view without the arrays it needs, or "exact" with K < V.
    """
    if name == "binary":
        return dv.binary_view(t.behavior_logprobs, t.logprobs)
    raw = t.raw
    if raw.topk_ids is None or raw.behavior_topk_logprobs is None or raw.topk_logprobs is None or raw.tokens is None:
        raise ValueError(
            f"view {name!r} needs tokens, topk_ids, behavior_topk_logprobs and topk_logprobs; capture a top-K view"
        )
    width = raw.topk_ids.shape[-1]
    if name == "exact" and width < raw.vocab_size:
        raise ValueError(f"view 'exact' needs K = V = {raw.vocab_size} captured log-probs, got K = {width}")
    # A masked position's ids and log-probs may be anything; a uniform pair in their place has D = D_dot = 0.
    keep = t.mask[..., None]
    even = -jnp.log(jnp.float32(width))
    return dv.topk_view(
        jnp.where(keep, raw.topk_ids, jnp.arange(width)),
        jnp.where(keep, raw.behavior_topk_logprobs, even),
        jnp.where(keep, raw.topk_logprobs, even),
        jnp.where(t.mask, raw.tokens, 0),
        jnp.where(t.mask, t.behavior_logprobs, even),
        jnp.where(t.mask, t.logprobs, even),
        raw.vocab_size,
        tail="uniform" if name == "topk_uniform" else "aggregated",
        topk_set=topk_set,
    )


def _ratio_direction(t: Tokens) -> jax.Array:
    """pi / mu - 1 [B, T]: of the pair whose divergence is D, whatever policy the surrogate's ratio is anchored to."""
    return bounded_exp(bounded_difference(t.logprobs, t.behavior_logprobs)) - 1


def _masked(t: Tokens, d, direction, delta_low, delta_high, ratio_cap) -> TokenLoss:
    outside = d > jnp.where(t.advantages < 0, delta_low, delta_high)
    kept = ~(outside & (t.advantages * direction > 0))
    loss = jnp.where(kept, surrogate(t, ratio_cap), 0.0)
    return TokenLoss(loss, kept, {"divergence/mean": d, "divergence/outside": outside})
