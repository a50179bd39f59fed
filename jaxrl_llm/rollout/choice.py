"""Choosing the next token, and knowing the distribution it was drawn from.

`behavior_distribution` applies, in this order, FP8 emulation of the logits, temperature, top-k, top-p and min-p; what is
left is renormalised. The log-probs it returns are those that the token is drawn from and that the rollout records.
"""

import dataclasses

import chex
import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm import schema
from jaxrl_llm.ops.fp8 import Format, fake_quant

PREFILTER = 256  # widest nucleus that is looked for without sorting the whole vocabulary


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
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    fp8: Format = "off"

    def __post_init__(self):
        schema.require(self.temperature >= 0, "temperature", self.temperature, "0 or more")
        schema.require(
            self.top_k >= 0 and not isinstance(self.top_k, bool), "top_k", self.top_k, "an integer of 0 or more"
        )
        schema.require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        schema.require(0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)")


@flax.struct.dataclass
class Distribution:
    """What a token is drawn from.

    Attributes:
      logprobs: float32 [B, V], normalised over the kept tokens; -inf elsewhere.
      log_kept_mass: float32 [B], log of the mass that was kept before renormalisation.
    """

    logprobs: jax.Array
    log_kept_mass: jax.Array


def behavior_distribution(logits: chex.Array, choice: Choice) -> Distribution:
    """The distribution that `choice` makes of logits [B, V]."""
    chex.assert_rank(logits, 2)
    logits = fake_quant(logits.astype(jnp.float32), choice.fp8)
    logprobs = jax.nn.log_softmax(logits / (choice.temperature or 1.0))
    threshold = _threshold(logprobs, choice)
    if threshold is None:
        return Distribution(logprobs, jnp.zeros(logprobs.shape[0], jnp.float32))
    kept = jnp.where(logprobs >= threshold[:, None], logprobs, -jnp.inf)
    log_kept_mass = jnp.minimum(jax.nn.logsumexp(kept, axis=-1), 0.0)
    return Distribution(kept - jax.nn.logsumexp(kept, axis=-1, keepdims=True), log_kept_mass)


def draw(distribution: Distribution, keys: jax.Array, choice: Choice) -> jax.Array:
    """int32 [B]: one token a row, by the row's own key (Gumbel-max), or the most probable one at temperature 0."""
    chex.assert_equal_shape_prefix([distribution.logprobs, keys], 1)
    if choice.temperature == 0:
        return jnp.argmax(distribution.logprobs, axis=-1)
    noise = jax.vmap(lambda key, row: jax.random.gumbel(key, row.shape, jnp.float32))(keys, distribution.logprobs)
    return jnp.argmax(distribution.logprobs + noise, axis=-1)


def entropy(distribution: Distribution) -> jax.Array:
    """float32 [B], nats."""
    logprobs = distribution.logprobs
    return -jnp.sum(jnp.where(jnp.isneginf(logprobs), 0.0, jnp.exp(logprobs) * logprobs), axis=-1)


def _threshold(logprobs: jax.Array, choice: Choice) -> jax.Array | None:
    """Least log-prob that is kept, [B], or None where everything is. Ties with the last kept token are kept."""
    bounds = []
    if 0 < choice.top_k < logprobs.shape[-1]:
        bounds.append(jax.lax.top_k(logprobs, choice.top_k)[0][:, -1])
    if choice.top_p < 1:
        # After top-k, the nucleus is that of the rest, whose mass is below 1.
        kept = jnp.where(logprobs >= bounds[0][:, None], logprobs, -jnp.inf) if bounds else logprobs
        bounds.append(_nucleus(kept, choice.top_p * jnp.sum(jnp.exp(kept), axis=-1)))
    if choice.min_p > 0:
        bounds.append(jnp.max(logprobs, axis=-1) + jnp.log(jnp.float32(choice.min_p)))
    return jnp.max(jnp.stack(bounds), axis=0) if bounds else None


def _nucleus(logprobs: jax.Array, mass: jax.Array) -> jax.Array:
    """Log-prob of the last token in the smallest most-probable set that holds `mass` [B]; [B].

    Nearly always a few hundred tokens hold the nucleus; the whole vocabulary is sorted only where they do not.
    """
    size = logprobs.shape[-1]

    def last(sorted_logprobs):
        probs = jnp.exp(sorted_logprobs)
        before = jnp.cumsum(probs, axis=-1) - probs
        count = jnp.sum(before < mass[:, None], axis=-1)
        return jnp.take_along_axis(sorted_logprobs, count[:, None] - 1, axis=-1)[:, 0]

    if size <= PREFILTER:
        return last(jax.lax.top_k(logprobs, size)[0])
    top = jax.lax.top_k(logprobs, PREFILTER)[0]
    covered = jnp.all(jnp.sum(jnp.exp(top), axis=-1) >= mass)
    return jax.lax.cond(covered, lambda: last(top), lambda: last(-jnp.sort(-logprobs, axis=-1)))
