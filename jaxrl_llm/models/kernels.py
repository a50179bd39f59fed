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

from jaxrl_llm.models import axes

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

    On a mesh whose sequence axis has several devices, each attends with the queries of its own tokens to all keys and values
    of its rows, which are gathered for it.

    Raises:
      ValueError: `cudnn` in another dtype than bfloat16, or with rows divided over the sequence axis.
    """
    chex.assert_shape(segment_ids, q.shape[:2])
    if kernel == "auto":
        platform = _platform()
        kernel = "splash" if platform == "tpu" and q.shape[1] >= SHORTEST else "xla"
    if kernel == "splash":
        return _splash(q, k, v, segment_ids)
    if kernel == "cudnn":
        if q.dtype != jnp.bfloat16:
            raise ValueError(f"config.model.attention = 'cudnn' computes in bfloat16; config.model.dtype is {q.dtype}")
        if axes.sequence_parts(q.shape[1]) > 1:
            raise ValueError(
                "config.model.attention = 'cudnn' sees whole rows; choose 'xla' with config.mesh.sequence > 1"
            )
        mask = _causal(segment_ids, jnp.arange(q.shape[1])[None], segment_ids)
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")
    place = jnp.broadcast_to(jnp.arange(q.shape[1]), segment_ids.shape)

    def local(of_queries, of_keys):
        (q, *rows), (k, v, all_ids) = of_queries, of_keys
        return _in_blocks(q, k, v, tuple(rows), lambda ids, own: _causal(ids, own, all_ids), block)

    of_queries, of_keys = (q, segment_ids, place), (k, v, segment_ids)
    if axes.sequence_parts(q.shape[1]) == 1:
        return local(of_queries, of_keys)
    # By hand: the compiler would take the blocks of queries, one after another, from the device that has them.
    return _on_mesh(local, of_queries, of_keys)


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

    length, parts, interpret = q.shape[1], axes.sequence_parts(q.shape[1]), _platform() != "tpu"
    block = min(4 * LANES, -(-length // (LANES * parts)) * LANES)
    padding = -length % (block * parts)
    whole = length + padding
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((whole, whole), shard_count=parts)] * _local_heads(q)),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,  # all heads see the same
        q_seq_shards=parts,
        interpret=interpret,
    )

    def local(of_queries, of_keys, kernel):
        (q, ids), (k, v, all_ids) = of_queries, of_keys
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.vmap(kernel)(q, k, v, splash.SegmentIds(ids, all_ids)).swapaxes(1, 2)

    q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q / math.sqrt(q.shape[-1]), k, v))
    ids = jnp.pad(segment_ids, ((0, 0), (0, padding)), constant_values=-1)
    if axes.current() is None:
        y = local((q, ids), (k, v, ids), kernel)
    else:
        place = NamedSharding(axes.current(), P(None, axes.SEQUENCE if parts > 1 else None))
        y = _on_mesh(local, (q, ids), (k, v, ids), (kernel, kernel.manual_sharding_spec(place)))
    return y[:, :length].astype(q.dtype)


def _on_mesh(local: Callable[..., jax.Array], of_queries: tuple, of_keys: tuple, *others: tuple[Any, Any]) -> jax.Array:
    """`local(of_queries, of_keys, *others)` on each device, with its rows and heads and its part of the queries.

    Args:
      local: returns what the queries are shaped like.
      of_queries: q [B, L, heads, D] and arrays [B, L], divided over the sequence axis.
      of_keys: k and v [B, L, kv_heads, D] and arrays [B, L], whole along it.
      others: pairs of a further argument and its partition.
    """
    mesh, (q, *_), (k, v, *rest) = axes.current(), of_queries, of_keys
    rows, part = axes.tokens(mesh, *q.shape[:2])
    heads = axes.even(mesh, q.shape[2], axes.TENSOR)
    if heads and axes.even(mesh, k.shape[2], heads) is None:
        # Fewer key heads than devices: each query head brings its own.
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))

    def spec(x, part):
        return P(rows, part, heads) if x.ndim == 4 else P(rows, part)

    of_keys = (k, v, *rest)
    inputs = tuple(spec(x, part) for x in of_queries), tuple(spec(x, None) for x in of_keys)
    arguments, specs = zip(*others, strict=True) if others else ((), ())
    # The kernel does not say over which axes its result varies, so that cannot be checked.
    mapped = jax.shard_map(local, in_specs=(*inputs, *specs), out_specs=inputs[0][0], check_vma=False)
    return mapped(of_queries, of_keys, *arguments)


def _local_heads(q: jax.Array) -> int:
    """Heads of q [B, L, heads, D] on one device."""
    mesh = axes.current()
    divided = mesh is not None and axes.even(mesh, q.shape[2], axes.TENSOR)
    return q.shape[2] // mesh.shape[axes.TENSOR] if divided else q.shape[2]


def _platform() -> Any:
    """Platform of the devices that the program is for: of the mesh, where there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.default_backend() if mesh.empty else mesh.abstract_device.platform
