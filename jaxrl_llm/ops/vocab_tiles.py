"""Softmax statistics of hidden @ unembedding, one tile of tokens x vocabulary at a time, and their gradients.

The forward pass walks along the vocabulary with running maxima and sums (online softmax, Milakov and Gimelshein 2018);
the backward pass recomputes each tile and turns it into its share of both gradients at once, so that no array of
[tokens, vocabulary] exists in either direction. Where the vocabulary is divided over devices, each walks along its own
part and the partial statistics are joined by `pmax` and `psum`; ids are looked up on the device that holds them.

These functions see one device's arrays. `token_stats` is the public door.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.fp8 import Format, fake_quant

# Stands for -inf in running maxima: finite, so that 0 * (difference of two of them) is 0.
LOWEST = -1e30
# Of a tile, at most. Tall ones are faster than wide ones of the same size: each piece of the unembedding and of its gradient
# is moved once for more tokens.
ROWS, COLUMNS = 4096, 2048


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to compute and in which pieces. Static under jit.

    Attributes:
      temperature: logits are divided by it.
      entropy: whether the entropy is wanted.
      fp8: format that the logits are rounded to, one scale per token.
      rows, columns: tokens and vocabulary entries per tile, at most.
      tied: the unembedding comes as [V, D], the way a tied embedding lies, so that nothing has to be turned around.
      vocab_axis: name of the mapped axis that divides the vocabulary, or None.
    """

    temperature: float = 1.0
    entropy: bool = False
    fp8: Format = "off"
    rows: int = ROWS
    columns: int = COLUMNS
    tied: bool = False
    vocab_axis: str | None = None


@flax.struct.dataclass
class Softmax:
    """Statistics of N softmax distributions, equal on every device that shares the vocabulary.

    Attributes:
      shift: float [N], the largest logit.
      log_sum: float [N], log of the sum of exp(logit - shift), so that the log-sum-exp is shift + log_sum.
      picked: float [N, C], log-probs at the given ids.
      entropy: float [N], nats, or None.
      amax: float [N], largest magnitude of the logits before rounding, or None where they are not rounded.
    """

    shift: jax.Array
    log_sum: jax.Array
    picked: jax.Array
    entropy: jax.Array | None
    amax: jax.Array | None


class Tiles:
    """The tiles of [n, V] tempered logits along the vocabulary, for one block of tokens.

    The last tile starts early where the width does not divide V; its first columns, seen before, are left out.

    Args:
      plan: see `Plan`.
      hidden: [n, D], or logits [n, V] where there is no unembedding.
      unembedding: [D, V], or [V, D] where tied, or None.
      amax: see `Softmax`.
    """

    def __init__(self, plan: Plan, hidden: jax.Array, unembedding: jax.Array | None, amax: jax.Array | None = None):
        self.plan, self.hidden, self.unembedding, self.amax = plan, hidden, unembedding, amax
        self.vocab = local_vocab(plan, hidden, unembedding)
        self.count = -(-self.vocab // plan.columns)
        # Equal widths in multiples of 128 (vector lanes) repeat as few columns as possible.
        self.width = min(self.vocab, -(-self.vocab // (self.count * 128)) * 128)
        self.exact = self.count * self.width == self.vocab

    def start(self, i: jax.Array) -> jax.Array:
        """First column of tile i."""
        return jnp.minimum(i * self.width, self.vocab - self.width)

    def fresh(self, i: jax.Array) -> jax.Array:
        """bool [width], the columns that no earlier tile holds."""
        return jnp.arange(self.width) >= i * self.width - self.start(i)

    def weights(self, i: jax.Array) -> jax.Array:
        """[D, width], the unembedding of tile i."""
        part = jax.lax.dynamic_slice_in_dim(self.unembedding, self.start(i), self.width, axis=1 - self.plan.tied)
        return part.T if self.plan.tied else part

    def raw(self, i: jax.Array) -> jax.Array:
        """[n, width], logits before rounding and temperature."""
        if self.unembedding is None:
            return jax.lax.dynamic_slice_in_dim(self.hidden, self.start(i), self.width, axis=1)
        return jnp.matmul(self.hidden, self.weights(i), preferred_element_type=wide(self.hidden.dtype))

    def logits(self, i: jax.Array) -> jax.Array:
        """[n, width], tempered; `LOWEST` at columns that an earlier tile holds."""
        logits = fake_quant(self.raw(i), self.plan.fp8, amax=self.amax) / self.plan.temperature
        return logits if self.exact else jnp.where(self.fresh(i), logits, LOWEST)

    def columns(self, i: jax.Array, ids: jax.Array) -> jax.Array:
        """Column of tile i that each of `ids` (counted from this device's first entry) has, or `width` where none."""
        first, columns = i * self.width, ids - self.start(i)
        return jnp.where((ids >= first) & (columns < self.width), columns, self.width)


def wide(dtype) -> jnp.dtype:
    """float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def local_vocab(plan: Plan, hidden: jax.Array, unembedding: jax.Array | None) -> int:
    """Vocabulary entries on this device."""
    return hidden.shape[1] if unembedding is None else unembedding.shape[1 - plan.tied]


def softmax_statistics(plan: Plan, hidden: jax.Array, unembedding: jax.Array | None, ids: jax.Array) -> Softmax:
    """Statistics of softmax(hidden @ unembedding / temperature), [N, D] x [D, V], with log-probs at ids [N, C].

    `unembedding` is this device's part of the vocabulary, `ids` count through all of it. Without an unembedding,
    `hidden` holds this device's part of the logits.
    """
    ids = ids - offset(plan, local_vocab(plan, hidden, unembedding))
    return map_rows(lambda part: _forward(plan, part[0], unembedding, part[1]), (hidden, ids), plan.rows)


def softmax_gradients(
    plan: Plan, hidden: jax.Array, unembedding: jax.Array, ids: jax.Array, stats: Softmax, cotangents: Softmax
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `softmax_statistics`, given cotangents of `log_sum` (the log-sum-exp's), `picked` and `entropy`.

    Returns:
      That of `hidden`, summed over the vocabulary's devices, and that of this device's `unembedding`, both as wide as
      the statistics.
    """
    ids = ids - offset(plan, local_vocab(plan, hidden, unembedding))
    dtype = wide(hidden.dtype)

    def add(d_unembedding, part):
        d_hidden, d_unembedding = _backward(plan, d_unembedding, unembedding, *part)
        return d_unembedding, d_hidden

    parts = (hidden, ids, stats, cotangents)
    d_unembedding = jnp.zeros(unembedding.shape, dtype)
    count = hidden.shape[0]
    if count <= plan.rows:
        d_unembedding, d_hidden = add(d_unembedding, parts)
    else:
        d_unembedding, d_hidden = jax.lax.scan(add, d_unembedding, split_rows(parts, plan.rows))
        d_hidden = join_rows(d_hidden, count)
    return total(plan, d_hidden), d_unembedding


def _forward(plan: Plan, hidden: jax.Array, unembedding: jax.Array | None, ids: jax.Array) -> Softmax:
    dtype, n = wide(hidden.dtype), hidden.shape[0]
    zeros = jnp.zeros(n, dtype)
    tiles = Tiles(plan, hidden, unembedding)
    amax = None
    if plan.fp8 != "off":
        # The scale of a token needs its whole row first.
        amax = jax.lax.fori_loop(0, tiles.count, lambda i, a: jnp.maximum(a, jnp.max(jnp.abs(tiles.raw(i)), -1)), zeros)
        amax = amax if plan.vocab_axis is None else jax.lax.pmax(amax, plan.vocab_axis)
        tiles = Tiles(plan, hidden, unembedding, amax)

    def body(i, carry):
        shift, mass, moment, picked = carry
        logits = tiles.logits(i)
        new = jnp.maximum(shift, jnp.max(logits, axis=-1))
        exps = jnp.exp(logits - new[:, None])
        if plan.entropy:
            moment = _moved(shift, mass, moment, new) + jnp.sum(exps * (logits - new[:, None]), axis=-1)
        mass = mass * jnp.exp(shift - new) + jnp.sum(exps, axis=-1)
        columns = tiles.columns(i, ids)
        found = jnp.take_along_axis(logits, columns, axis=-1, mode="clip")
        return new, mass, moment, picked + jnp.where(columns < tiles.width, found, 0.0)

    start = (jnp.full(n, LOWEST, dtype), zeros, zeros, jnp.zeros(ids.shape, dtype))
    shift, mass, moment, picked = jax.lax.fori_loop(0, tiles.count, body, start)
    if plan.vocab_axis is not None:
        new = jax.lax.pmax(shift, plan.vocab_axis)
        moment, mass = _moved(shift, mass, moment, new), mass * jnp.exp(shift - new)
        shift, (mass, moment, picked) = new, total(plan, (mass, moment, picked))
    log_sum = jnp.log(mass)
    return Softmax(
        shift=shift,
        log_sum=log_sum,
        # The difference of the large numbers first: near certainty it is what keeps the digits.
        picked=picked - shift[:, None] - log_sum[:, None],
        entropy=log_sum - moment / mass if plan.entropy else None,
        amax=amax,
    )


def _moved(shift, mass, moment, new):
    """sum of exp(l - shift) (l - shift), with `new` for the shift; `mass` is the sum of exp(l - shift)."""
    return (moment + (shift - new) * mass) * jnp.exp(shift - new)


def _backward(plan: Plan, d_unembedding, unembedding, hidden, ids, stats: Softmax, cotangents: Softmax):
    """With p the softmax, l its logits, k an id and H the entropy:

    d log p_k / dl_j = [j = k] - p_j,    d logsumexp / dl_j = p_j,    dH / dl_j = -p_j (log p_j + H).
    """
    tiles = Tiles(plan, hidden, unembedding, stats.amax)
    flat = cotangents.log_sum - jnp.sum(cotangents.picked, axis=-1)
    slope = None
    if plan.entropy:
        flat, slope = flat - cotangents.entropy * stats.entropy, -cotangents.entropy
    rows, axis = jnp.arange(hidden.shape[0])[:, None], 1 - plan.tied

    def body(i, carry):
        d_hidden, d_unembedding = carry
        logprobs = tiles.logits(i) - stats.shift[:, None] - stats.log_sum[:, None]
        factor = flat[:, None] if slope is None else flat[:, None] + slope[:, None] * logprobs
        d_logits = jnp.exp(logprobs) * factor
        d_logits = d_logits.at[rows, tiles.columns(i, ids)].add(cotangents.picked, mode="drop")
        d_logits = (d_logits / plan.temperature).astype(hidden.dtype)
        d_hidden += jnp.matmul(d_logits, tiles.weights(i).T, preferred_element_type=d_hidden.dtype)
        # On CPU this product is nearly twice as fast as its transpose; the barrier keeps XLA from merging the two.
        part = jnp.matmul(d_logits.T, hidden, preferred_element_type=d_hidden.dtype)
        part = part if plan.tied else jax.lax.optimization_barrier(part).T
        old = jax.lax.dynamic_slice_in_dim(d_unembedding, tiles.start(i), tiles.width, axis)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_unembedding, old + part, tiles.start(i), axis)

    return jax.lax.fori_loop(0, tiles.count, body, (jnp.zeros(hidden.shape, wide(hidden.dtype)), d_unembedding))


def map_rows(function, tree, size: int):
    """`function(tree)` for blocks of at most `size` rows, one after another, with the results' rows joined."""
    count = jax.tree.leaves(tree)[0].shape[0]
    if count <= size:
        return function(tree)
    return join_rows(jax.lax.map(function, split_rows(tree, size)), count)


def split_rows(tree, size: int):
    """[n, ...] -> [blocks, rows, ...] with at most `size` rows each, filled up with zeros."""

    def split(x):
        blocks = -(-x.shape[0] // size)
        rows = -(-x.shape[0] // blocks)
        padded = jnp.pad(x, [(0, blocks * rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(blocks, rows, *x.shape[1:])

    return jax.tree.map(split, tree)


def join_rows(tree, count: int):
    """The reverse of `split_rows`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], tree)


def offset(plan: Plan, size: int):
    """Id of this device's first vocabulary entry, where each holds `size`."""
    return 0 if plan.vocab_axis is None else jax.lax.axis_index(plan.vocab_axis) * size


def total(plan: Plan, x):
    """The sum over the devices that share the vocabulary."""
    return x if plan.vocab_axis is None else jax.lax.psum(x, plan.vocab_axis)
