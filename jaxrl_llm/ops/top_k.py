"""Exact selection over a large vocabulary without sorting it: the k largest, and the smallest set that holds a mass.

On CPU a full sort of [32, 49152] takes hundreds of times as long as one pass over it, so neither function sorts more
than a few thousand candidates. Both are exact: blocks that cannot hold one of the k largest are skipped, and a threshold
is found by counting.
"""

import math

import chex
import jax
import jax.numpy as jnp


def top_k(x: chex.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row, falling, and where they stand; among equals the lower index first, as `lax.top_k`.

    The k blocks with the largest maxima hold the k largest elements, so only they are looked through.

    Args:
      x: float [B, V].
      k: at most V.

    Returns:
      Values [B, k] and int32 indices [B, k].
    """
    chex.assert_rank(x, 2)
    rows, size = x.shape
    block = 2 ** round(math.log2(math.sqrt(size / max(k, 1))))  # makes both passes about equally long
    blocks = -(-size // block)
    if blocks <= k:
        return jax.lax.top_k(x, k)
    padded = jnp.pad(x, [(0, 0), (0, blocks * block - size)], constant_values=-jnp.inf)
    parts = padded.reshape(rows, blocks, block)
    # In order of index, so that equals keep theirs.
    chosen = jnp.sort(jax.lax.top_k(jnp.max(parts, axis=-1), k)[1], axis=-1)
    candidates = jnp.take_along_axis(parts, chosen[:, :, None], axis=1).reshape(rows, k * block)
    values, at = jax.lax.top_k(candidates, k)
    return values, jnp.take_along_axis(chosen, at // block, axis=1) * block + at % block


def nucleus(logprobs: chex.Array, mass: chex.Array) -> jax.Array:
    """The threshold above which the most probable tokens hold `mass`: {logprobs >= threshold} is the smallest such set.

    Equal tokens are kept together. Bisection over the float32 numbers themselves, which are ordered as the integers of
    their bits: some 25 passes over a row, whatever its distribution.

    Args:
      logprobs: float32 [B, V], none above 0; -inf for tokens that are out.
      mass: float32 [B], in probability. Where a row holds less, all of it is kept.

    Returns:
      float32 [B].
    """
    chex.assert_rank([logprobs, mass], [2, 1])
    surprisal = jnp.maximum(-logprobs.astype(jnp.float32), 0.0)
    probs = jnp.exp(-surprisal)

    def bits(x):
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    def surprisal_of(bits):
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def halve(bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        inside = jnp.sum(jnp.where(surprisal <= surprisal_of(middle)[:, None], probs, 0.0), axis=-1)
        enough = inside >= mass
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    # Surprisals up to `low` hold too little, those up to `high` enough.
    low = bits(jnp.min(surprisal, axis=-1)) - 1
    high = bits(jnp.max(surprisal, axis=-1))
    low, high = jax.lax.while_loop(lambda bounds: jnp.any(bounds[1] - bounds[0] > 1), halve, (low, high))
    return -surprisal_of(high)
