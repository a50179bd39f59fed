"""Softmax attention, by the kernel that suits device and length.

`xla` runs everywhere; long sequences go through it one block of queries at a time. `splash` is the flash attention of
TPUs (jax.experimental.pallas), which never holds the scores and skips what lies above the diagonal; on other devices it is
interpreted, for tests. `cudnn` is the flash attention of NVIDIA GPUs, in bfloat16 only. `auto` is splash on TPUs from
`SHORTEST` tokens on, else xla.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm import axes

Kernel = Literal["auto", "xla", "splash", "cudnn"]

BLOCK = 1024  # queries of one block of `xla`
SHORTEST = 512  # below, padding to a kernel's block costs more than it saves
LANES = 128  # splash attention's blocks are multiples of it
NEVER = -0.5 * float(jnp.finfo(jnp.float32).max)  # score of what is masked; finite, for rows that see nothing


def masked_attention(q: chex.Array, k: chex.Array, v: chex.Array, mask: chex.Array, block: int = BLOCK) -> jax.Array:
    """softmax(q k / sqrt(head_dim)) v of new tokens against a cache.

    Args:
      q: [B, Q, heads, head_dim].
      k, v: [B, S, kv_heads, head_dim].
      mask: bool [B, Q, S], what each query attends to.
      block: queries per block; up to two blocks are attended to at once.

    Returns:
      [B, Q, heads, head_dim].
    """
    return _in_blocks(q, k, v, (mask,), lambda mask: mask, block)


def cached_attention(q: chex.Array, keys: chex.Array, values: chex.Array, mask: chex.Array) -> jax.Array:
    """`masked_attention` over keys [B, kv_heads, head_dim, S] and values [B, kv_heads, S, head_dim] as a cache holds them."""
    if q.shape[1] > 1:
        return masked_attention(q, jnp.moveaxis(keys, 3, 1), jnp.swapaxes(values, 1, 2), mask)
    # A single query multiplies the cache as it lies, all heads of a group at once.
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("bkgh,bkhs->bkgs", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None], scores / math.sqrt(q.shape[-1]), NEVER)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights, values).reshape(q.shape)


def causal_attention(
    q: chex.Array, k: chex.Array, v: chex.Array, segment_ids: chex.Array, kernel: Kernel = "auto", block: int = BLOCK
) -> jax.Array:
    """softmax(q k / sqrt(head_dim)) v of whole sequences: each token attends to itself and those before it in its segment.

    Args:
      q: [B, L, heads, head_dim].
      k, v: [B, L, kv_heads, head_dim].
      segment_ids: int32 [B, L]; equal numbers are one segment, also those of padding, whose result nobody reads.
      kernel: see the module docstring.
      block: queries per block of `xla`.

    Returns:
      [B, L, heads, head_dim].

    Raises:
      ValueError: `cudnn` in another dtype than bfloat16.
    """
    chex.assert_shape(segment_ids, q.shape[:2])
    if kernel == "auto":
        platform = _platform()
        kernel = "splash" if platform == "tpu" and q.shape[1] >= SHORTEST else "xla"
    if kernel == "splash":
        return _splash(q, k, v, segment_ids)
    if kernel == "cudnn" and q.dtype != jnp.bfloat16:
        raise ValueError(f"config.model.attention = 'cudnn' computes in bfloat16; config.model.dtype is {q.dtype}")

    def attend(q, k, v, ids, place, all_ids):
        if kernel == "xla":
            return _in_blocks(q, k, v, (ids, place), lambda ids, own: _causal(ids, own, all_ids), block)
        mask = _causal(ids, place, all_ids)
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")

    place = jnp.broadcast_to(jnp.arange(q.shape[1]), segment_ids.shape)
    return _on_mesh(attend, q, k, v, (segment_ids, place), segment_ids)


def _division(q: jax.Array) -> tuple[axes.Axes, axes.Axes, axes.Axes]:
    """Mesh axes that divide rows, queries and heads of q [B, L, heads, head_dim]."""
    mesh = axes.current()
    heads = None if mesh is None else axes.even(q.shape[2], mesh, axes.TENSOR)
    return (*axes.whole_sequences(*q.shape[:2]), heads)


def _on_mesh(attend: Callable[..., jax.Array], q, k, v, of_queries, of_keys, *extra: tuple[Any, Any]) -> jax.Array:
    """`attend(q, k, v, *of_queries, of_keys, *extra)`, on a mesh each device for its own rows, heads and queries.

    Keys and values, few beside the queries in grouped attention, are gathered along the sequence where it is divided.

    Args:
      attend: one device's attention.
      q, k, v: as in `causal_attention`.
      of_queries: arrays [B, L], divided as the queries are.
      of_keys: [B, L], whole as the keys are.
      extra: further arguments, each with its partition.
    """
    mesh, (rows, columns, heads) = axes.current(), _division(q)
    arguments = [argument for argument, _ in extra]
    if mesh is None:
        return attend(q, k, v, *of_queries, of_keys, *arguments)
    if heads and not axes.even(k.shape[2], mesh, heads):
        # Fewer key heads than devices: each query head brings its own.
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    divided, whole = P(rows, columns, heads), P(rows, None, heads)
    inputs = (divided, whole, whole, *[P(rows, columns)] * len(of_queries), P(rows), *(spec for _, spec in extra))
    # A flash kernel does not say over which axes its result varies, so that cannot be checked.
    mapped = jax.shard_map(attend, in_specs=inputs, out_specs=divided, check_vma=False)
    return mapped(q, k, v, *of_queries, of_keys, *arguments)


def _causal(ids: jax.Array, place: jax.Array, all_ids: jax.Array) -> jax.Array:
    """bool [B, Q, L]: keys of the queries' own segment, up to their own place."""
    return (ids[:, :, None] == all_ids[:, None, :]) & (place[:, :, None] >= jnp.arange(all_ids.shape[1]))


def _in_blocks(q, k, v, rows: tuple[jax.Array, ...], mask: Callable[..., jax.Array], block: int) -> jax.Array:
    """One block of queries at a time; the scores of one block are all that exists at once, in the backward pass too.

    `mask` makes bool [B, block, S] of a block of `rows` ([B, Q, ...]).
    """
    length = q.shape[1]
    if length <= 2 * block:
        return jax.nn.dot_product_attention(q, k, v, mask=mask(*rows)[:, None])
    count = -(-length // block)

    def blocks(x):
        x = jnp.pad(x, [(0, 0), (0, count * block - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(part):
        queries, *rows = part
        return jax.nn.dot_product_attention(queries, k, v, mask=mask(*rows)[:, None])

    y = jnp.moveaxis(jax.lax.map(one, tuple(map(blocks, (q, *rows)))), 0, 1)
    return y.reshape(y.shape[0], count * block, *y.shape[3:])[:, :length]


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    # Imported here: where it is not used, nobody should pay for pallas or depend on it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mesh, length = axes.current(), q.shape[1]
    parts = axes.parts(mesh, axes.SEQUENCE)
    block = min(4 * LANES, -(-length // (parts * LANES)) * LANES)
    padding = -length % (parts * block)
    whole = length + padding
    q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    ids = jnp.pad(segment_ids, ((0, 0), (0, padding)), constant_values=-1)
    _, columns, heads = _division(q)
    # Which blocks lie above the diagonal depends on whose queries they are: the kernel's tables are divided with them.
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((whole, whole))] * (q.shape[2] // axes.parts(mesh, heads))),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=parts,
        interpret=_platform() != "tpu",
    )
    tables = None if mesh is None else kernel.manual_sharding_spec(NamedSharding(mesh, P(None, columns)))

    def attend(q, k, v, ids, all_ids, kernel):
        q, k, v = (x.swapaxes(1, 2) for x in (q / math.sqrt(q.shape[-1]), k, v))
        return jax.vmap(kernel)(q, k, v, splash.SegmentIds(ids, all_ids)).swapaxes(1, 2).astype(q.dtype)

    return _on_mesh(attend, q, k, v, (ids,), ids, (kernel, tables))[:, :length]


def _platform() -> Any:
    """Platform of the devices that the program is for: of the mesh, where there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.default_backend() if mesh.empty else mesh.abstract_device.platform
