"""What a policy objective sees and gives back, and the one place where inputs are made safe.

`LossInputs` are raw arrays; `sanitize` turns them into `Tokens`, on which every objective is written. Whatever a masked
position holds (NaN and infinities included) is replaced there before any arithmetic, so neither value nor gradient
depends on it.
"""

import chex
import flax.struct
import jax
import jax.numpy as jnp

# Bounds of log r before exp: e^20 is finite in every float, and no useful update lives beyond it.
LOG_RATIO_BOUND = 20.0
# Bound of log-probs, and of log r where it is used without exp (output-reset margins, k2).
RAW_LOG_RATIO_BOUND = 1e4


@flax.struct.dataclass
class LossInputs:
    """Per-token statistics of a batch: B sequences, T response positions, K ids of the behaviour policy's top-K view.

    Attributes:
      logprobs: float [B, T], log pi of the sampled token under the current policy; differentiable.
      behavior_logprobs: float [B, T], log mu of the sampled token under the distribution really sampled from.
      advantages: float [B, T].
      mask: bool [B, T], positions that count.
      old_logprobs: float [B, T], log pi_old (training policy before this rollout's updates), or None.
      reference_logprobs: float [B, T], under a frozen reference policy, or None.
      entropy: float [B, T], entropy of the current policy in nats; differentiable; or None.
      kl_scale: float [B], factor on the coefficient of the reference KL (an adaptive one), or None for 1.
      tokens: int32 [B, T], the sampled ids; needed with a top-K view.
      topk_ids: int32 [B, T, K], ids of the view, or None.
      behavior_topk_logprobs: float [B, T, K], log mu at those ids, or None.
      topk_logprobs: float [B, T, K], log pi (full softmax) at those ids, or None.
      vocab_size: V, static; needed by views with a uniform tail and to recognise a complete view.
    """

    logprobs: chex.Array
    behavior_logprobs: chex.Array
    advantages: chex.Array
    mask: chex.Array
    old_logprobs: chex.Array | None = None
    reference_logprobs: chex.Array | None = None
    entropy: chex.Array | None = None
    kl_scale: chex.Array | None = None
    tokens: chex.Array | None = None
    topk_ids: chex.Array | None = None
    behavior_topk_logprobs: chex.Array | None = None
    topk_logprobs: chex.Array | None = None
    vocab_size: int = flax.struct.field(pytree_node=False, default=0)


@flax.struct.dataclass
class Tokens:
    """Inputs made safe; what every objective is written on. Float32, or float64 where `logprobs` is.

    Attributes:
      logprobs: [B, T], log pi_k; differentiable; 0 where masked.
      anchor_logprobs: [B, T], log-probs of the policy in the ratio's denominator (behaviour or old); constant.
      behavior_logprobs: [B, T], log mu_k; constant.
      log_ratio: [B, T], logprobs - anchor, bounded to +-RAW_LOG_RATIO_BOUND; differentiable.
      ratio: [B, T], r = exp(log_ratio bounded to +-LOG_RATIO_BOUND); differentiable.
      advantages: [B, T], A; 0 where masked.
      mask: bool [B, T].
      missing: bool [B, T], unmasked positions without a behaviour log-prob (NaN); their ratio is 1.
      raw: the inputs, for views and penalties.
    """

    logprobs: jax.Array
    anchor_logprobs: jax.Array
    behavior_logprobs: jax.Array
    log_ratio: jax.Array
    ratio: jax.Array
    advantages: jax.Array
    mask: jax.Array
    missing: jax.Array
    raw: LossInputs


@flax.struct.dataclass
class TokenLoss:
    """An objective's answer for each token; nothing is divided here.

    Attributes:
      loss: [B, T], to be minimised; differentiable.
      kept: bool [B, T], False where a mask or an active clip stopped the gradient; None where the rule has no such notion.
      metrics: name -> [B, T] values to be averaged over the mask.
    """

    loss: jax.Array
    kept: jax.Array | None = None
    metrics: dict[str, jax.Array] = flax.struct.field(default_factory=dict)


@flax.struct.dataclass
class Metric:
    """A mean in the making: sums over micro-batches and shards add up, and the division comes last."""

    numerator: jax.Array
    denominator: jax.Array


@flax.struct.dataclass
class LossTerms:
    """A batch's contribution to the loss: `value = sum of numerators / sum of denominators`, divided once.

    Attributes:
      numerator: scalar; differentiable.
      denominator: scalar; constant.
      metrics: means in the making.
      maxima: name -> scalar; combine by maximum.
    """

    numerator: jax.Array
    denominator: jax.Array
    metrics: dict[str, Metric]
    maxima: dict[str, jax.Array]


def sanitize(inputs: LossInputs, anchor: str = "behavior") -> Tokens:
    """Checks shapes, replaces what is masked or missing, and forms the ratio.

    Args:
      inputs: raw arrays.
      anchor: "behavior" (r = pi / mu) or "old" (r = pi / pi_old).

    Raises:
      ValueError: `anchor="old"` without `old_logprobs`.
      AssertionError: shapes that do not agree.
    """
    chex.assert_rank([inputs.logprobs, inputs.behavior_logprobs, inputs.advantages, inputs.mask], 2)
    chex.assert_equal_shape([inputs.logprobs, inputs.behavior_logprobs, inputs.advantages, inputs.mask])
    dtype = jnp.promote_types(inputs.logprobs.dtype, jnp.float32)
    mask = inputs.mask.astype(bool)

    def clean(x):
        return jnp.where(mask, x, 0.0).astype(dtype)

    logprobs = jnp.maximum(clean(inputs.logprobs), -RAW_LOG_RATIO_BOUND)
    constant = jax.lax.stop_gradient(logprobs)
    behavior = clean(jax.lax.stop_gradient(inputs.behavior_logprobs))
    missing = jnp.isnan(behavior)
    behavior = jnp.where(missing, constant, behavior)
    anchor_logprobs = behavior
    if anchor == "old":
        if inputs.old_logprobs is None:
            raise ValueError("anchor 'old' needs old_logprobs, which are missing from the inputs")
        chex.assert_equal_shape([inputs.old_logprobs, inputs.logprobs])
        anchor_logprobs = clean(jax.lax.stop_gradient(inputs.old_logprobs))
    log_ratio = bounded_difference(logprobs, anchor_logprobs)
    return Tokens(
        logprobs=logprobs,
        anchor_logprobs=anchor_logprobs,
        behavior_logprobs=behavior,
        log_ratio=log_ratio,
        ratio=bounded_exp(log_ratio),
        advantages=clean(jax.lax.stop_gradient(inputs.advantages)),
        mask=mask,
        missing=missing,
        raw=inputs,
    )


def bounded_difference(a: chex.Array, b: chex.Array) -> jax.Array:
    """a - b within +-RAW_LOG_RATIO_BOUND; 0 where both are the same infinity."""
    same = (a == b) & jnp.isinf(a)
    difference = jnp.where(same, 0.0, a) - jnp.where(same, 0.0, b)
    return jnp.clip(difference, -RAW_LOG_RATIO_BOUND, RAW_LOG_RATIO_BOUND)


def bounded_exp(log_ratio: chex.Array) -> jax.Array:
    """exp of a log-ratio bounded to +-LOG_RATIO_BOUND."""
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def extended_exp(log_ratio: chex.Array) -> jax.Array:
    """exp up to LOG_RATIO_BOUND and its tangent beyond: finite, once differentiable, and never without a gradient."""
    return jnp.exp(jnp.minimum(log_ratio, LOG_RATIO_BOUND)) * (1 + jnp.maximum(log_ratio - LOG_RATIO_BOUND, 0.0))


def exp_excess(x: chex.Array) -> jax.Array:
    """e^x - 1 - x (k3), continued by its tangent above LOG_RATIO_BOUND, so that both terms are bounded together.

    Were e^x alone clipped, the derivative there would be -1 where the truth is e^x - 1: of the wrong sign.
    """
    near = jnp.minimum(x, LOG_RATIO_BOUND)
    # expm1 keeps the digits that e^x - 1 loses near 0.
    return jnp.expm1(near) - near + jnp.expm1(LOG_RATIO_BOUND) * jnp.maximum(x - LOG_RATIO_BOUND, 0.0)


def divide(numerator: chex.Array, denominator: chex.Array) -> jax.Array:
    """numerator / denominator, and 0 where nothing was counted (an all-masked batch has loss 0 and gradient 0)."""
    return jnp.where(denominator > 0, numerator, 0.0) / jnp.where(denominator > 0, denominator, 1.0)


def masked_mean(values: chex.Array, mask: chex.Array) -> Metric:
    """Mean of `values` [B, T] over `mask`, in the making."""
    dtype = values.dtype if jnp.issubdtype(values.dtype, jnp.floating) else jnp.float32
    values = jax.lax.stop_gradient(values).astype(dtype)
    return Metric(jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask).astype(dtype))


def add(a: LossTerms, b: LossTerms) -> LossTerms:
    """The terms of two disjoint batches together."""
    return LossTerms(
        numerator=a.numerator + b.numerator,
        denominator=a.denominator + b.denominator,
        metrics=jax.tree.map(jnp.add, a.metrics, b.metrics),
        maxima=jax.tree.map(jnp.maximum, a.maxima, b.maxima),
    )


def across(terms: LossTerms, axis_name: str) -> LossTerms:
    """The terms of all shards together, inside pmap or shard_map over `axis_name`."""
    total = jax.lax.psum((terms.numerator, terms.denominator, terms.metrics), axis_name)
    return LossTerms(*total, maxima=jax.lax.pmax(terms.maxima, axis_name))
