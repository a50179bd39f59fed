"""Cache of the decoder: fixed length, filled slot by slot, validity carried beside it."""

import chex
import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.delta_net import RecurrentState, init_state


@flax.struct.dataclass
class KeyValue:
    """Keys and values of one attention layer, [B, S, kv_heads, head_dim] in the model's dtype."""

    keys: jax.Array
    values: jax.Array


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
    shape = (batch, length, config.num_kv_heads, config.head_dim)
    routing = (batch, length, config.num_moe_layers, config.moe.experts_per_token)

    def part(kind):
        if kind.mixer == "linear_attention":
            return init_state(config, batch)
        return KeyValue(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))

    return KVCache(
        layers=tuple(map(part, config.layer_kinds)),
        valid=jnp.zeros((batch, length), bool),
        routed_experts=jnp.zeros(routing, jnp.int32) if record_routing else None,
    )


def write(buffer: jax.Array, new: jax.Array, slots: chex.Array) -> jax.Array:
    """Puts `new` [B, Q, ...] into `buffer` [B, S, ...] from slot `slots` on: int32 [] for all rows, or [B] row by row."""
    if jnp.ndim(slots) == 0:
        return jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), slots, axis=1)
    columns = slots[:, None] + jnp.arange(new.shape[1])
    return buffer.at[jnp.arange(buffer.shape[0])[:, None], columns].set(new.astype(buffer.dtype), mode="drop")


def grow(cache: KVCache, length: int) -> KVCache:
    """The same cache with `length` slots, the new ones empty; recurrent states have no slots."""
    extra = length - cache.length
    if extra < 0:
        raise ValueError(f"a cache of {cache.length} slots cannot shrink to {length}")

    def pad(x):
        if isinstance(x, RecurrentState):
            return x
        return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2))

    return jax.tree.map(pad, cache, is_leaf=lambda x: isinstance(x, RecurrentState))


def repeat(cache: KVCache, times: int) -> KVCache:
    """Every row `times` times, adjacent: one prefilled prompt serves its group of samples."""
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), cache)
