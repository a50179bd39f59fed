"""Cache of the decoder: fixed length, filled slot by slot, validity carried beside it."""

import functools
from collections.abc import Callable

import chex
import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.delta_net import RecurrentState, init_state


@flax.struct.dataclass
class KeyValue:
    """Keys and values of one attention layer, in the model's dtype.

    They lie as a decoding step multiplies them. In another order XLA copies the whole cache at every step, which on a
    CPU takes longer than attention itself.

    Attributes:
      keys: [B, kv_heads, head_dim, S].
      values: [B, kv_heads, S, head_dim].
    """

    keys: jax.Array
    values: jax.Array

    def append(self, keys: jax.Array, values: jax.Array, slots: chex.Array) -> "KeyValue":
        """With new keys and values [B, Q, kv_heads, head_dim] from slot `slots` on."""
        return KeyValue(
            write(self.keys, jnp.moveaxis(keys, 1, 3), slots, axis=3),
            write(self.values, jnp.swapaxes(values, 1, 2), slots, axis=2),
        )


@flax.struct.dataclass
class KVCache:
    """What the decoder keeps of the tokens seen so far.

    Attributes:
      layers: each layer's part: a `KeyValue` where it attends, a `RecurrentState` where it is a gated delta net.
      valid: bool [B, S], slots that hold a real token. Slots are in order of time within a row.
      routed_experts: int32 [B, S, MoE layers, experts per token], the experts each token went through, or None where
        they are not recorded.
    """

    layers: tuple[KeyValue | RecurrentState, ...]
    valid: jax.Array
    routed_experts: jax.Array | None = None

    @property
    def length(self) -> int:
        """S, slots per row."""
        return self.valid.shape[1]


def init_cache(config: ModelConfig, batch: int, length: int, *, record_routing: bool = False) -> KVCache:
    """An empty cache of `length` slots for `batch` rows; `record_routing` makes it remember the experts' choice."""
    heads = (batch, config.num_kv_heads)
    routing = (batch, length, config.num_moe_layers, config.moe.experts_per_token)

    def part(kind):
        if kind.mixer == "linear_attention":
            return init_state(config, batch)
        keys = jnp.zeros((*heads, config.head_dim, length), config.dtype)
        return KeyValue(keys, jnp.zeros((*heads, length, config.head_dim), config.dtype))

    return KVCache(
        layers=tuple(map(part, config.layer_kinds)),
        valid=jnp.zeros((batch, length), bool),
        routed_experts=jnp.zeros(routing, jnp.int32) if record_routing else None,
    )


def write(buffer: jax.Array, new: jax.Array, slots: chex.Array, axis: int = 1) -> jax.Array:
    """Puts `new` into `buffer` [B, ...] from slot `slots` of `axis` on: int32 [] for all rows, or [B] row by row."""
    new = new.astype(buffer.dtype)
    if jnp.ndim(slots) == 0:
        return jax.lax.dynamic_update_slice_in_dim(buffer, new, slots, axis)
    buffer, new = jnp.moveaxis(buffer, axis, 1), jnp.moveaxis(new, axis, 1)
    columns = slots[:, None] + jnp.arange(new.shape[1])
    buffer = buffer.at[jnp.arange(buffer.shape[0])[:, None], columns].set(new, mode="drop")
    return jnp.moveaxis(buffer, 1, axis)


def map_arrays(apply: Callable[..., jax.Array], cache: KVCache, *others: KVCache) -> KVCache:
    """`apply(axis, array, *arrays of others)` for each array; `axis` is that of its slots, None in a recurrent state."""

    def part(first, *rest):
        if isinstance(first, RecurrentState):
            return jax.tree.map(functools.partial(apply, None), first, *rest)
        keys, values = zip(*((x.keys, x.values) for x in (first, *rest)), strict=True)
        return KeyValue(apply(3, *keys), apply(2, *values))

    layers = tuple(map(part, cache.layers, *(other.layers for other in others)))
    valid = apply(1, cache.valid, *(other.valid for other in others))
    if cache.routed_experts is None:
        return KVCache(layers, valid)
    return KVCache(layers, valid, apply(1, cache.routed_experts, *(other.routed_experts for other in others)))


def grow(cache: KVCache, length: int) -> KVCache:
    """The same cache with `length` slots, the new ones empty; recurrent states have no slots."""
    extra = length - cache.length
    if extra < 0:
        raise ValueError(f"a cache of {cache.length} slots cannot shrink to {length}")

    def pad(axis, x):
        return x if axis is None else jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)])

    return map_arrays(pad, cache)


def repeat(cache: KVCache, times: int) -> KVCache:
    """Every row `times` times, adjacent: one prefilled prompt serves its group of samples."""
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), cache)
