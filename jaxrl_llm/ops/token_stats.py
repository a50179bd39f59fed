"""Statistics of next-token distributions over a large vocabulary, without ever holding [N, V].

Use it between a model's hidden states and an objective. Tokens are processed in chunks; the backward pass recomputes a
chunk's logits instead of keeping them, so the peak is one [chunk, V] block in either direction. Only what is asked for
enters the program.
"""

import functools

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.fp8 import Format, fake_quant
from jaxrl_llm.types import TokenStats


def token_stats(
    hidden: chex.Array,
    unembedding: chex.Array,
    tokens: chex.Array,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    ids: chex.Array | None = None,
    mask: chex.Array | None = None,
    fp8: Format = "off",
    chunk_size: int = 1024,
) -> TokenStats:
    """Log-probs of the sampled tokens under softmax(hidden @ unembedding / temperature), and more on request.

    Args:
      hidden: [N, D], float of any width.
      unembedding: [D, V].
      tokens: int32 [N], the sampled tokens.
      temperature: above 0.
      entropy: also the entropy in nats.
      ids: int32 [N, K], vocabulary ids whose log-probs are wanted too.
      mask: bool [N]; rows that are False are replaced by zeros before any arithmetic (their statistics mean nothing
        and no gradient passes, whatever their hidden state holds).
      fp8: format that the logits are rounded to, one scale per token, as an emulating sampler rounds its own.
      chunk_size: tokens per block.

    Returns:
      `TokenStats` with float32 [N] (and [N, K]) fields, float64 where the inputs are. Differentiable in `hidden` and
      `unembedding`.

    Raises:
      ValueError: temperature not above 0.
    """
    chex.assert_rank([hidden, unembedding, tokens], [2, 2, 1])
    chex.assert_equal_shape_prefix([hidden, tokens], 1)
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; a distribution needs it above 0")
    count = hidden.shape[0]
    if mask is not None:
        chex.assert_equal_shape([mask, tokens])
        hidden = jnp.where(mask[:, None], hidden, 0)
        tokens = jnp.where(mask, tokens, 0)
        ids = None if ids is None else jnp.where(mask[:, None], ids, 0)
    one = functools.partial(_chunk_stats, temperature=temperature, entropy=entropy, fp8=fp8)
    if count <= chunk_size:
        return one(hidden, unembedding, tokens, ids)

    chunks = -(-count // chunk_size)

    def blocks(x):
        padded = jnp.pad(x, [(0, chunks * chunk_size - count)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(chunks, chunk_size, *x.shape[1:])

    # Recomputing is one more matrix product per chunk; keeping would be one [N, V] array.
    body = jax.checkpoint(lambda part: one(part[0], unembedding, part[1], part[2]), prevent_cse=False)
    stats = jax.lax.map(body, (blocks(hidden), blocks(tokens), None if ids is None else blocks(ids)))
    return jax.tree.map(lambda x: x.reshape(chunks * chunk_size, *x.shape[2:])[:count], stats)


def logits_stats(logits: chex.Array, tokens: chex.Array, *, entropy: bool = False, ids=None) -> TokenStats:
    """The same statistics from (tempered) logits [N, V] that exist already.

    Args:
      logits: float32 or wider [N, V].
      tokens: int32 [N].
      entropy: also the entropy in nats.
      ids: int32 [N, K] or None.
    """
    chex.assert_rank([logits, tokens], [2, 1])
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    sampled = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return TokenStats(
        logprobs=sampled - logsumexp,
        entropy=_entropy(logits, logsumexp) if entropy else None,
        topk_logprobs=None if ids is None else jnp.take_along_axis(logits, ids, axis=-1) - logsumexp[:, None],
    )


def _chunk_stats(hidden, unembedding, tokens, ids, *, temperature: float, entropy: bool, fp8: Format) -> TokenStats:
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = fake_quant(jnp.matmul(hidden, unembedding, preferred_element_type=dtype), fp8)
    return logits_stats(logits / temperature, tokens, entropy=entropy, ids=ids)


def _entropy(logits, logsumexp):
    logprobs = logits - logsumexp[:, None]
    # A probability of exactly 0 contributes 0, not 0 * -inf.
    return -jnp.sum(jnp.where(jnp.isneginf(logprobs), 0.0, jnp.exp(logprobs) * logprobs), axis=-1)
