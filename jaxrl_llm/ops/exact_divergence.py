"""D and D_dot between two distributions over the whole vocabulary, without ever holding [N, V].

Use it where a top-K view is not enough: to know what a truncated view leaves out, or to see whether an optimizer step
really moved a token's divergence (`objectives.diagnostics`). It walks along the vocabulary twice, once for the two
log-sum-exps and once for the sums of `objectives.divergence`; neither has a gradient.
"""

import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_llm.objectives.divergence import KL, LOG_FLOOR, Divergence
from jaxrl_llm.ops import vocab_tiles
from jaxrl_llm.ops.token_stats import Layout, check, on_mesh, place
from jaxrl_llm.ops.vocab_tiles import Plan, Tiles, map_rows, softmax_statistics, total

# Hidden states [N, D] with their unembedding [D, V], or logits [N, V] before the temperature.
Source = tuple[chex.Array, chex.Array] | chex.Array


def exact_divergence(
    behavior: Source,
    policy: Source,
    tokens: chex.Array,
    kind: Divergence = KL,
    *,
    temperature: float = 1.0,
    mask: chex.Array | None = None,
    chunk_size: int = vocab_tiles.ROWS,
    vocab_chunk: int = vocab_tiles.COLUMNS,
    layout: Layout | None = None,
) -> tuple[jax.Array, jax.Array]:
    """D(mu, pi) of every token's whole distribution, and its rate along the policy-gradient step on that token.

    Args:
      behavior, policy: mu and pi, each as (hidden [N, D], unembedding [D, V]) or as logits [N, V]; D may differ.
      tokens: int32 [N], the sampled tokens.
      kind: one of `objectives.divergence`, such as KL(mu || pi).
      temperature: above 0, of both.
      mask: bool [N]; the results are 0 where it is False, whatever the sources hold there.
      chunk_size, vocab_chunk, layout: as in `token_stats`.

    Returns:
      (D, D_dot), float32 [N] each, float64 where the sources are.

    Raises:
      ValueError: temperature or a chunk not above 0.
    """
    chex.assert_rank(tokens, 1)
    check(temperature, chunk_size, vocab_chunk)
    mu, pi = (_pair(source, tokens, mask) for source in (behavior, policy))
    sizes = [(x if w is None else w).shape[1] for x, w in (mu, pi)]
    chex.assert_equal(*sizes)
    if mask is not None:
        tokens = jnp.where(mask, tokens, 0)
    plan, rows, table = place(Plan(temperature, rows=chunk_size, columns=vocab_chunk), layout, len(tokens), sizes[0])
    sources = tuple(((P(rows, plan.vocab_axis), P()) if w is None else (P(rows), table)) for _, w in (mu, pi))
    result = on_mesh(
        layout, functools.partial(_divergence, plan, kind), in_specs=(*sources, P(rows)), out_specs=P(rows)
    )(mu, pi, tokens)
    return result if mask is None else jax.tree.map(lambda x: jnp.where(mask, x, 0.0), result)


def _pair(source: Source, tokens, mask):
    """(hidden, unembedding) or (logits, None), without gradient."""
    array, unembedding = source if isinstance(source, tuple) else (source, None)
    chex.assert_rank(array, 2)
    chex.assert_equal_shape_prefix([array, tokens], 1)
    if unembedding is not None:
        chex.assert_shape(unembedding, (array.shape[1], None))
    if mask is not None:
        array = jnp.where(mask[:, None], array, 0)
    return jax.lax.stop_gradient((array, unembedding))


def _divergence(plan: Plan, kind: Divergence, mu, pi, tokens):
    """On one device's part of the arrays; a block of tokens at a time."""

    def block(part):
        hidden_mu, hidden_pi, token = part
        sides = [(hidden_mu, mu[1]), (hidden_pi, pi[1])]
        stats = [softmax_statistics(plan, *side, token[:, None]) for side in sides]
        tiles = [Tiles(plan, *side) for side in sides]
        return _sums(plan, kind, stats, tiles)

    return map_rows(block, (mu[0], pi[0], tokens), plan.rows)


def _sums(plan: Plan, kind: Divergence, stats, tiles: list[Tiles]):
    """With v = onehot(k) - pi and g pi the slope: D_dot = sum_j g_j pi_j (v_j - sum_i pi_i v_i), sums taken apart."""
    fresh = tiles[0].fresh

    def body(i, sums):
        logprobs = [t.logits(i) - s.shift[:, None] - s.log_sum[:, None] for t, s in zip(tiles, stats, strict=True)]
        slots = _slots(*logprobs)
        term, slope, pi = kind.term(*slots), kind.slope(*slots), slots[1]
        new = jnp.stack([term, slope, slope * pi, pi * pi])
        return sums + jnp.sum(jnp.where(fresh(i), new, 0.0), axis=-1)

    start = jnp.zeros((4, stats[0].shift.shape[0]), stats[1].shift.dtype)
    divergence, slope, slope_pi, pi_pi = total(plan, jax.lax.fori_loop(0, tiles[0].count, body, start))
    sampled = _slots(stats[0].picked[:, 0], stats[1].picked[:, 0])
    mean_v = sampled[1] - pi_pi
    return divergence, kind.slope(*sampled) - slope_pi - mean_v * slope


def _slots(log_mu, log_pi):
    """mu, pi, log mu, log pi, bounded as `objectives.divergence.View` bounds them."""
    log_mu, log_pi = jnp.minimum(log_mu, 0.0), jnp.minimum(log_pi, 0.0)
    return jnp.exp(log_mu), jnp.exp(log_pi), jnp.maximum(log_mu, LOG_FLOOR), jnp.maximum(log_pi, LOG_FLOOR)
