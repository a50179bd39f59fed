"""The rows that a model's forward pass runs over: a batch's own, or packed ones that several sequences share.

Both kinds answer the same questions, so that a forward pass reads alike: which tokens go in, what comes out before each
response token, and how statistics of response tokens come back to [B, T], where losses live. Packed rows leave padding
and left-out sequences aside; a token attends within its own sequence either way, so only rounding tells them apart.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import axes
from jaxrl_llm.types import Batch


def rows_of(batch: Batch) -> "OwnRows | PackedRows":
    """The rows in which the forward pass takes `batch`."""
    return OwnRows(batch) if batch.packing is None else PackedRows(batch)


class OwnRows:
    """One sequence a row, padding included.

    Attributes:
      tokens, positions, segment_ids, routed_experts: the model's inputs [R, S], see `Decoder.hidden_and_routing`.
    """

    def __init__(self, batch: Batch):
        # Padding in front, so that a mesh can divide the columns evenly.
        length = batch.tokens.shape[1]
        front = -length % axes.parts(axes.current(), axes.SEQUENCE)
        inputs = (batch.tokens, batch.positions, batch.segment_ids, batch.routed_experts)
        padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (front, 0), *((0, 0),) * (x.ndim - 2))), inputs)
        self.tokens, self.positions, self.segment_ids, self.routed_experts = padded
        self._shape = batch.response_mask.shape
        self._first = front + length - self._shape[1]

    def before(self, hidden: jax.Array) -> jax.Array:
        """[N, D] from hidden states [R, S, D]: those that the response tokens are predicted from."""
        # The token at column j is predicted from column j - 1.
        return hidden[:, self._first - 1 : -1].reshape(-1, hidden.shape[-1])

    def pick(self, x: chex.Array) -> jax.Array:
        """[N, ...] from [B, T, ...], in the order of `before`."""
        return x.reshape(-1, *x.shape[2:])

    def place(self, x: chex.Array) -> jax.Array:
        """[B, T, ...] from [N, ...], the reverse of `pick`; anything where no loss is carried."""
        return x.reshape(*self._shape, *x.shape[1:])

    def around(self, x: chex.Array) -> jax.Array:
        """[B, T + 1] from [R, S]: x before each response token, and after the last; anything elsewhere."""
        return x[:, self._first - 1 :]


class PackedRows:
    """The same for `batch.packing`: N counts the response tokens that carry loss, and some filler."""

    def __init__(self, batch: Batch):
        p = self._packing = batch.packing
        self._shape, length = batch.response_mask.shape, batch.tokens.shape[1]
        self._first = length - self._shape[1]
        sequences = self._shape[0] // p.shards
        chex.assert_equal(self._shape[0], p.shards * p.sequences, custom_message="not the part that was packed")

        # ---- Where each token goes, and where each slot's token comes from; what goes nowhere lies beyond the end
        real = (batch.segment_ids > 0) & (p.offset >= 0)[:, None]
        slots = jnp.where(real, p.offset[:, None] + batch.positions, p.rows * p.width)
        self._slots = slots.reshape(p.shards, sequences, length)
        beyond = sequences * length
        empty = jnp.full((p.shards, p.rows * p.width), beyond, jnp.int32)
        origin = jnp.broadcast_to(jnp.arange(beyond, dtype=jnp.int32), (p.shards, beyond))
        self._origin = _put(empty, self._slots.reshape(p.shards, -1), origin)

        # ---- The model's inputs; sequences are numbered within their block, so that neighbours differ
        numbers = jnp.where(real, 1 + jnp.arange(self._shape[0])[:, None] % sequences, 0)
        self.tokens, self.positions = self._pack(batch.tokens), self._pack(batch.positions)
        self.segment_ids = self._pack(numbers.astype(jnp.int32))
        self.routed_experts = None if batch.routed_experts is None else self._pack(batch.routed_experts)

        # ---- The response tokens that carry loss
        mask = (batch.response_mask & (p.offset >= 0)[:, None]).reshape(p.shards, -1)
        size = mask.shape[1]
        self._chosen = jax.vmap(lambda row: jnp.nonzero(row, size=p.tokens, fill_value=size)[0])(mask)

    def before(self, hidden: jax.Array) -> jax.Array:
        slots = self._slots[:, :, self._first - 1 : -1].reshape(self._packing.shards, -1)
        slots = _take(slots, self._chosen)
        blocks = hidden.reshape(self._packing.shards, -1, hidden.shape[-1])
        return _take(blocks, slots).reshape(-1, hidden.shape[-1])

    def pick(self, x: chex.Array) -> jax.Array:
        return _take(x.reshape(self._packing.shards, -1, *x.shape[2:]), self._chosen).reshape(-1, *x.shape[2:])

    def place(self, x: chex.Array) -> jax.Array:
        p, tail = self._packing, x.shape[1:]
        empty = jnp.zeros((p.shards, p.sequences * self._shape[1], *tail), x.dtype)
        return _put(empty, self._chosen, x.reshape(p.shards, -1, *tail)).reshape(*self._shape, *tail)

    def around(self, x: chex.Array) -> jax.Array:
        shards = self._packing.shards
        slots = self._slots[:, :, self._first - 1 :].reshape(shards, -1)
        return _take(x.reshape(shards, -1), slots).reshape(self._shape[0], -1)

    def _pack(self, x: jax.Array) -> jax.Array:
        p, tail = self._packing, x.shape[2:]
        return _take(x.reshape(p.shards, -1, *tail), self._origin).reshape(p.shards * p.rows, p.width, *tail)


# Blocks are gathered from and scattered to by themselves, so that on a mesh each device works on its own.
_take = jax.vmap(lambda x, at: x.at[at].get(mode="fill", fill_value=0))
_put = jax.vmap(lambda x, at, values: x.at[at].set(values, mode="drop"))
