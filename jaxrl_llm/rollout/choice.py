"""Choosing the next token, and knowing the distribution it was drawn from.

`behavior_distribution` applies, in this order, FP8 emulation of the logits, temperature, top-k, top-p and min-p; what is
left is renormalised. The log-probs it returns are those that the token is drawn from and that the rollout records.
"""

import dataclasses
from typing import Literal

import chex
import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm import schema
from jaxrl_llm.ops import top_k as selection
from jaxrl_llm.ops.fp8 import Format, fake_quant
from jaxrl_llm.types import TopKView

PREFILTER = 256  # most probable tokens of a large vocabulary among which a nucleus is looked for first
SMALL = 8192  # up to here a nucleus is found faster without them
LANES = 128  # tokens per block of the two-level draw


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a token is chosen. Static under jit.

    Attributes:
      temperature: logits are divided by it; 0 takes the most probable token (its recorded log-prob is that of the
        distribution at temperature 1, since a greedy choice has none of its own).
      top_k: keep the k most probable tokens; 0 for all.
      top_p: keep the smallest set of most probable tokens that holds at least this mass; 1 for all.
      min_p: drop tokens less probable than this share of the most probable one; 0 for none.
      fp8: format that the logits are rounded to, one scale per token.
      topk_view: what the captured top-K view records of a truncated distribution: "whole", log-probs over the whole
        vocabulary, cut tokens included; or "sampled", those that are drawn from, -inf where a token was cut.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    fp8: Format = "off"
    topk_view: Literal["whole", "sampled"] = "whole"

    def __post_init__(self):
        schema.require(self.temperature >= 0, "temperature", self.temperature, "0 or more")
        schema.require(
            self.top_k >= 0 and not isinstance(self.top_k, bool), "top_k", self.top_k, "an integer of 0 or more"
        )
        schema.require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        schema.require(0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)")
        schema.require(self.topk_view in ("whole", "sampled"), "topk_view", self.topk_view, "whole or sampled")


@flax.struct.dataclass
class Distribution:
    """What a token is drawn from.

    Attributes:
      logprobs: float32 [B, V], normalised over the kept tokens; -inf elsewhere.
      log_kept_mass: float32 [B], log of the mass that was kept before renormalisation.
      topk: the most probable tokens, [B, K], or None where none were asked for.
    """

    logprobs: jax.Array
    log_kept_mass: jax.Array
    topk: TopKView | None = None


def behavior_distribution(logits: chex.Array, choice: Choice, capture: int = 0) -> Distribution:
    """The distribution that `choice` makes of logits [B, V], with its `capture` most probable tokens."""
    chex.assert_rank(logits, 2)
    size = logits.shape[-1]
    logits = fake_quant(logits.astype(jnp.float32), choice.fp8)
    logprobs = jax.nn.log_softmax(logits / (choice.temperature or 1.0))

    # One selection serves the top-k bound, the nucleus and the captured view.
    width = max(capture, choice.top_k if choice.top_k < size else 0)
    if choice.top_p < 1 and size > SMALL:
        width = max(width, PREFILTER)
    top, ids = selection.top_k(logprobs, width) if width else (None, None)
    threshold = _threshold(logprobs, top, choice)
    if threshold is None:
        log_kept_mass = jnp.zeros(logits.shape[0], jnp.float32)
    else:
        logprobs = jnp.where(logprobs >= threshold[:, None], logprobs, -jnp.inf)
        total = jax.nn.logsumexp(logprobs, axis=-1)
        logprobs, log_kept_mass = logprobs - total[:, None], jnp.minimum(total, 0.0)
        if capture and choice.topk_view == "sampled":
            top = jnp.where(top >= threshold[:, None], top - total[:, None], -jnp.inf)
    return Distribution(logprobs, log_kept_mass, TopKView(ids[:, :capture], top[:, :capture]) if capture else None)


def random_numbers(keys: jax.Array, steps: jax.Array) -> jax.Array:
    """What `draw` needs, float32 [B, W, 2] in [0, 1): of sequences with `keys` [B] at response positions `steps` int32 [B, W]."""

    def one(key, step):
        return jax.random.uniform(jax.random.fold_in(key, step), (2,))

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(keys, steps)


def draw(distribution: Distribution, uniform: jax.Array, choice: Choice) -> jax.Array:
    """int32 [B]: one token a row, by the row's own numbers [B, 2], or the most probable one at temperature 0.

    Two levels of inversion: a block of the vocabulary, then a token in it. That takes two random numbers a row where
    Gumbel noise takes V, which costs more than all the rest of a draw; and each level has 23 random bits of its own.
    """
    logprobs = distribution.logprobs
    chex.assert_equal_shape_prefix([logprobs, uniform], 1)
    if choice.temperature == 0:
        return jnp.argmax(logprobs, axis=-1)
    rows, size = logprobs.shape
    probs = jnp.pad(jnp.exp(logprobs), [(0, 0), (0, -size % LANES)]).reshape(rows, -1, LANES)
    block = _invert(jnp.sum(probs, axis=-1), uniform[:, 0])
    inside = jnp.take_along_axis(probs, block[:, None, None], axis=1)[:, 0]
    return block * LANES + _invert(inside, uniform[:, 1])


def entropy(distribution: Distribution) -> jax.Array:
    """float32 [B], nats."""
    logprobs = distribution.logprobs
    return -jnp.sum(jnp.where(jnp.isneginf(logprobs), 0.0, jnp.exp(logprobs) * logprobs), axis=-1)


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """int32 [B]: where the running sum of `weights` [B, N] passes `uniform` [B] of the whole; never at a zero."""
    total = jnp.cumsum(weights, axis=-1)
    positive = weights > 0
    passed = positive & (total > uniform[:, None] * total[:, -1:])
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)  # where rounding lets nothing pass
    return jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), last)


def _threshold(logprobs: jax.Array, top: jax.Array | None, choice: Choice) -> jax.Array | None:
    """Least log-prob that is kept, [B], or None where everything is. Ties with the last kept token are kept.

    Args:
      logprobs: [B, V].
      top: the largest of them, falling: at least `choice.top_k`, and `PREFILTER` for a nucleus in a large vocabulary.
      choice: which bounds there are.
    """
    bounds = []
    if 0 < choice.top_k < logprobs.shape[-1]:
        bounds.append(top[:, choice.top_k - 1])
    if choice.top_p < 1:
        # After top-k, the nucleus is that of the rest, whose mass is below 1.
        if bounds:
            logprobs, top = (jnp.where(x >= bounds[0][:, None], x, -jnp.inf) for x in (logprobs, top))
        bounds.append(_nucleus(logprobs, top, choice.top_p * jnp.sum(jnp.exp(logprobs), axis=-1)))
    if choice.min_p > 0:
        bounds.append(jnp.max(logprobs, axis=-1) + jnp.log(jnp.float32(choice.min_p)))
    return jnp.max(jnp.stack(bounds), axis=0) if bounds else None


def _nucleus(logprobs: jax.Array, top: jax.Array | None, mass: jax.Array) -> jax.Array:
    """Log-prob of the last token in the smallest most-probable set that holds `mass` [B]; [B].

    A few hundred tokens nearly always hold the nucleus of a trained model; the vocabulary is gone through only where
    they do not. A row's answer never depends on which of the two the others needed.
    """
    if logprobs.shape[-1] <= SMALL:
        return selection.nucleus(logprobs, mass)
    probs = jnp.exp(top)
    before = jnp.cumsum(probs, axis=-1) - probs
    count = jnp.sum(before < mass[:, None], axis=-1)
    among_top = jnp.take_along_axis(top, count[:, None] - 1, axis=-1)[:, 0]
    covered = jnp.sum(probs, axis=-1) >= mass
    everywhere = jax.lax.cond(jnp.all(covered), lambda: among_top, lambda: selection.nucleus(logprobs, mass))
    return jnp.where(covered, among_top, everywhere)
