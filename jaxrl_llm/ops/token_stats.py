"""Statistics of next-token distributions over a large vocabulary, without ever holding [N, V].

Use it between a model's hidden states and an objective. The logits exist one tile of tokens x vocabulary at a time; the
backward pass recomputes a tile instead of keeping it (`vocab_tiles`). Only what is asked for enters the program. On a
mesh, tokens and vocabulary stay divided: no logits travel, only sums of one number per token.

Written here rather than taken from a library because no JAX library computes log-probs, entropy and log-probs at given
ids of one pass over the logits, with gradients of all of them, over a divided vocabulary.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl_llm import axes
from jaxrl_llm.ops import vocab_tiles
from jaxrl_llm.ops.fp8 import Format
from jaxrl_llm.ops.vocab_tiles import Plan, Softmax
from jaxrl_llm.types import TokenStats


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the arrays lie on a mesh. Hashable.

    Attributes:
      mesh: the mesh.
      rows: mesh axes that divide the tokens.
      vocab: mesh axis that divides the vocabulary.
    """

    mesh: Mesh
    rows: tuple[str, ...] = axes.TOKENS
    vocab: str = axes.TENSOR

    def fit(self, count: int, vocab_size: int) -> tuple[tuple[str, ...], str | None]:
        """The row axes, from the first, and the vocabulary axis that divide these sizes; () and None for none."""
        return axes.even(count, self.mesh, self.rows) or (), axes.even(vocab_size, self.mesh, self.vocab)


def token_stats(
    hidden: chex.Array,
    unembedding: chex.Array,
    tokens: chex.Array,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    logsumexp: bool = False,
    ids: chex.Array | None = None,
    mask: chex.Array | None = None,
    fp8: Format = "off",
    tied: bool = False,
    chunk_size: int = vocab_tiles.ROWS,
    vocab_chunk: int = vocab_tiles.COLUMNS,
    layout: Layout | None = None,
) -> TokenStats:
    """Log-probs of the sampled tokens under softmax(hidden @ unembedding / temperature), and more on request.

    Args:
      hidden: [N, D], float of any width.
      unembedding: [D, V], or [V, D] with `tied`.
      tokens: int32 [N], the sampled tokens.
      temperature: above 0.
      entropy: also the entropy in nats.
      logsumexp: also the log-sum-exp of the tempered logits.
      ids: int32 [N, K], vocabulary ids whose log-probs are wanted too.
      mask: bool [N]; rows that are False are replaced by zeros before any arithmetic (their statistics mean nothing
        and no gradient passes, whatever their hidden state holds).
      fp8: format that the logits are rounded to, one scale per token, as an emulating sampler rounds its own.
      tied: the unembedding is an embedding as it lies; turning it around first would cost a copy each way.
      chunk_size, vocab_chunk: tokens and vocabulary entries per tile, at most.
      layout: how the arrays lie on a mesh, or None for GSPMD's choice (or one device).

    Returns:
      `TokenStats` with float32 [N] (and [N, K]) fields, float64 where the inputs are. Differentiable in `hidden` and
      `unembedding`, once.

    Raises:
      ValueError: temperature or a chunk not above 0.
    """
    chex.assert_rank([hidden, unembedding, tokens], [2, 2, 1])
    chex.assert_equal_shape_prefix([hidden, tokens], 1)
    chex.assert_equal(hidden.shape[1], unembedding.shape[int(tied)])
    check(temperature, chunk_size, vocab_chunk)
    if mask is not None:
        chex.assert_equal_shape([mask, tokens])
        hidden = jnp.where(mask[:, None], hidden, 0)
        tokens = jnp.where(mask, tokens, 0)
        ids = None if ids is None else jnp.where(mask[:, None], ids, 0)
    picked = tokens[:, None] if ids is None else jnp.concatenate([tokens[:, None], ids], axis=1)
    plan = Plan(temperature, entropy, fp8, chunk_size, vocab_chunk, tied)
    stats = _statistics(plan, layout, hidden, unembedding, picked)
    return TokenStats(
        logprobs=stats.picked[:, 0],
        entropy=stats.entropy,
        topk_logprobs=None if ids is None else stats.picked[:, 1:],
        logsumexp=stats.shift + stats.log_sum if logsumexp else None,
    )


def check(temperature: float, *chunks: int) -> None:
    """Refuses what no tile can be made of.

    Raises:
      ValueError: temperature or a chunk not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; a distribution needs it above 0")
    if min(chunks) <= 0:
        raise ValueError(f"chunks are {chunks}; a tile needs each above 0")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _statistics(plan: Plan, layout: Layout | None, hidden, unembedding, ids) -> Softmax:
    plan, rows, table = place(plan, layout, hidden.shape[0], unembedding.shape[1 - plan.tied])
    return on_mesh(
        layout,
        functools.partial(vocab_tiles.softmax_statistics, plan),
        in_specs=(P(rows), table, P(rows)),
        out_specs=P(rows),
    )(hidden, unembedding, ids)


def _statistics_forward(plan, layout, hidden, unembedding, ids):
    stats = _statistics(plan, layout, hidden, unembedding, ids)
    return stats, (hidden, unembedding, ids, stats)


def _statistics_backward(plan, layout, residuals, cotangents):
    hidden, unembedding, ids, stats = residuals
    plan, rows, table = place(plan, layout, hidden.shape[0], unembedding.shape[1 - plan.tied])

    def gradients(hidden, unembedding, ids, stats, cotangents):
        d_hidden, d_unembedding = vocab_tiles.softmax_gradients(plan, hidden, unembedding, ids, stats, cotangents)
        return d_hidden, jax.lax.psum(d_unembedding, rows) if rows else d_unembedding

    d_hidden, d_unembedding = on_mesh(
        layout,
        gradients,
        in_specs=(P(rows), table, P(rows), P(rows), P(rows)),
        out_specs=(P(rows), table),
    )(hidden, unembedding, ids, stats, cotangents)
    # Integers have no gradient.
    return d_hidden.astype(hidden.dtype), d_unembedding.astype(unembedding.dtype), None


_statistics.defvjp(_statistics_forward, _statistics_backward)


def place(plan: Plan, layout: Layout | None, count: int, vocab_size: int):
    """The plan with its mapped axis, the row axes that fit these sizes, and the unembedding's partition."""
    rows, vocab = ((), None) if layout is None else layout.fit(count, vocab_size)
    return dataclasses.replace(plan, vocab_axis=vocab), rows, P(vocab, None) if plan.tied else P(None, vocab)


def on_mesh(layout: Layout | None, function, *, in_specs, out_specs):
    """`function` on each device's part of the arrays, or on the whole where there is no layout."""
    if layout is None:
        return function
    return jax.shard_map(function, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
