"""The decoder, top to bottom: embedding, blocks of attention and gated feed-forward, final norm, unembedding.

One set of parameters, stacked over layers, serves two forwards built from the same block: `hidden` scans over the
stack (training: small program, optional rematerialisation), `decode` runs the layers one by one against a cache
(sampling: no copy of a layer's weights per step). Llama, Qwen2 and Qwen3 differ in `ModelConfig` fields only.
"""

import math
import operator
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.cache import KVCache
from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.ops.fp8 import Fp8Sites, fake_quant

NO_FP8 = Fp8Sites()


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones(size, config.param_dtype))
        self.eps = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`, kernel [in, out]; the input is rounded to FP8 where activations are emulated."""

    def __init__(self, size_in: int, size_out: int, config: ModelConfig, *, bias: bool = False, rngs: nnx.Rngs):
        scale = 1 / math.sqrt(size_in)
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (size_in, size_out), config.param_dtype))
        self.bias = nnx.Param(jnp.zeros(size_out, config.param_dtype)) if bias else None

    def __call__(self, x: jax.Array, fp8: Fp8Sites) -> jax.Array:
        # Two dimensions: on CPU, XLA's weight gradient of a product with more is twice as slow.
        y = fake_quant(x, fp8.activations).reshape(-1, x.shape[-1]) @ self.kernel[...].astype(x.dtype)
        y = y if self.bias is None else y + self.bias[...].astype(x.dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        width, bias = c.hidden_size, c.attention_bias
        self.query = Linear(width, c.num_heads * c.head_dim, c, bias=bias, rngs=rngs)
        self.key = Linear(width, c.num_kv_heads * c.head_dim, c, bias=bias, rngs=rngs)
        self.value = Linear(width, c.num_kv_heads * c.head_dim, c, bias=bias, rngs=rngs)
        self.out = Linear(c.num_heads * c.head_dim, width, c, rngs=rngs)
        self.query_norm = RMSNorm(c.head_dim, c) if c.qk_norm else None
        self.key_norm = RMSNorm(c.head_dim, c) if c.qk_norm else None

    def project(self, x: jax.Array, rope: tuple, fp8: Fp8Sites) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value [B, L, heads, head_dim], normed and rotated, key and value as the cache holds them."""
        c = self.config
        q = self.query(x, fp8).reshape(*x.shape[:-1], c.num_heads, c.head_dim)
        k = self.key(x, fp8).reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim)
        v = self.value(x, fp8).reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim)
        if self.query_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotate(q, rope), rotate(k, rope)
        return q, fake_quant(k, fp8.kv_cache), fake_quant(v, fp8.kv_cache)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, fp8: Fp8Sites) -> jax.Array:
        """Attention of q [B, Q, heads, head_dim] over k, v [B, S, kv_heads, head_dim] where mask bool [B, Q, S]."""
        y = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        return self.out(y.reshape(*y.shape[:2], y.shape[2] * y.shape[3]), fp8)


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config
        self.gate = Linear(c.hidden_size, c.intermediate_size, c, rngs=rngs)
        self.up = Linear(c.hidden_size, c.intermediate_size, c, rngs=rngs)
        self.down = Linear(c.intermediate_size, c.hidden_size, c, rngs=rngs)

    def __call__(self, x: jax.Array, fp8: Fp8Sites) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x, fp8)) * self.up(x, fp8), fp8)


class Block(nnx.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(self, x: jax.Array, rope: tuple, mask: jax.Array, fp8: Fp8Sites) -> jax.Array:
        """Whole sequences: every token attends where `mask` bool [B, L, L] allows."""
        q, k, v = self.attention.project(self.attention_norm(x), rope, fp8)
        return self._finish(x, self.attention.attend(q, k, v, mask, fp8), fp8)

    def decode(self, x, rope, mask, keys, values, slots, fp8):
        """New tokens against the cache: writes their keys and values, then attends over it. Returns x, keys, values."""
        q, k, v = self.attention.project(self.attention_norm(x), rope, fp8)
        keys, values = caches.write(keys, k, slots), caches.write(values, v, slots)
        return self._finish(x, self.attention.attend(q, keys, values, mask, fp8), fp8), keys, values

    def _finish(self, x: jax.Array, attended: jax.Array, fp8: Fp8Sites) -> jax.Array:
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x), fp8)


class Decoder(nnx.Module):
    """A causal language model.

    Attributes:
      embedding: [V, D].
      layers: a `Block` whose parameters carry a leading axis of `num_layers`.
      norm: the final norm.
      head: [D, V], or None where the embedding is tied.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, config.param_dtype))
        make = nnx.vmap(lambda rngs: Block(config, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=config.num_layers)(make)(rngs)
        self.norm = RMSNorm(config.hidden_size, config)
        tied = config.tie_word_embeddings
        self.head = (
            None if tied else nnx.Param(0.02 * jax.random.normal(rngs.params(), shape[::-1], config.param_dtype))
        )

    def hidden(
        self, tokens: chex.Array, positions: chex.Array, segment_ids: chex.Array, fp8: Fp8Sites | None = None
    ) -> jax.Array:
        """Final hidden states of whole sequences, for training and scoring.

        Args:
          tokens: int32 [B, L].
          positions: int32 [B, L], within each segment.
          segment_ids: int32 [B, L]; a token attends to earlier tokens of its own segment; 0 is padding.
          fp8: emulated sites (activations, kv_cache), straight-through gradients.

        Returns:
          [B, L, D] in the model's dtype, after the final norm; undefined but finite at padding.
        """
        chex.assert_rank([tokens, positions, segment_ids], 2)
        chex.assert_equal_shape([tokens, positions, segment_ids])
        fp8 = fp8 or NO_FP8
        rope = rope_angles(positions, self.config)
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        mask = same & (segment_ids > 0)[:, None, :] & jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        graphdef, stacked = nnx.split(self.layers)

        def layer(x, params):
            return nnx.merge(graphdef, params)(x, rope, mask, fp8), None

        if self.config.remat != "none":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if self.config.remat == "dots" else None
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        x, _ = jax.lax.scan(layer, self._embed(tokens), stacked, unroll=self.config.scan_unroll)
        return self.norm(x)

    def decode(
        self,
        tokens: chex.Array,
        positions: chex.Array,
        cache: KVCache,
        slots: chex.Array,
        token_mask: chex.Array,
        fp8: Fp8Sites | None = None,
        layers: tuple[Any, ...] | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states of new tokens given the cache; prefill (Q tokens) and single steps (Q = 1) alike.

        Args:
          tokens: int32 [B, Q].
          positions: int32 [B, Q], within each sequence.
          cache: filled before slot `slots`.
          slots: int32 [] or [B], the slot that column 0 is written to.
          token_mask: bool [B, Q]; False marks left padding, which nothing attends to.
          fp8: emulated sites.
          layers: per-layer parameters from `unstack_layers`, or None to slice them here.

        Returns:
          Hidden states [B, Q, D] after the final norm, and the cache with the new tokens.
        """
        chex.assert_equal_shape([tokens, positions, token_mask])
        fp8 = fp8 or NO_FP8
        valid = caches.write(cache.valid, token_mask, slots)
        # Slots are ordered in time, so a query sees the valid slots up to its own.
        own = jnp.reshape(slots, (-1, 1)) + jnp.arange(tokens.shape[1])
        mask = valid[:, None, :] & (jnp.arange(cache.length) <= own[:, :, None])
        rope = rope_angles(positions, self.config)
        graphdef, stacked = nnx.split(self.layers)
        if layers is None:
            layers = _unstack(stacked, self.config.num_layers)
        x, keys, values = self._embed(tokens), [], []
        for i, params in enumerate(layers):
            block = nnx.merge(graphdef, params)
            x, k, v = block.decode(x, rope, mask, cache.keys[i], cache.values[i], slots, fp8)
            keys.append(k)
            values.append(v)
        return self.norm(x), KVCache(tuple(keys), tuple(values), valid)

    def unembedding(self) -> jax.Array:
        """[D, V] in the model's dtype."""
        matrix = self.embedding[...].T if self.head is None else self.head[...]
        return matrix.astype(self.config.dtype)

    def logits(self, hidden: chex.Array) -> jax.Array:
        """float32 [..., V]."""
        return jnp.matmul(hidden, self.unembedding(), preferred_element_type=jnp.float32)

    def _embed(self, tokens: chex.Array) -> jax.Array:
        return self.embedding[...].astype(self.config.dtype)[tokens]


def unstack_layers(params: nnx.State) -> tuple[Any, ...]:
    """The stacked layers of a decoder's parameters as a tuple of per-layer trees, for `Decoder.decode`."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    return _unstack(params["layers"], count)


def rope_angles(positions: chex.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine float32 [..., 1, head_dim / 2] of the rotary embedding at `positions` (Su 2021)."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = _scale_frequencies(config.rope_theta**-exponent, config.rope_scaling)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [B, L, heads, head_dim], pairing component i with i + head_dim / 2."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _scale_frequencies(frequencies: jax.Array, scaling: RopeScaling) -> jax.Array:
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3.1: long wavelengths are stretched, short ones kept, the band between interpolated.
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _unstack(stacked: Any, count: int) -> tuple[Any, ...]:
    return tuple(jax.tree.map(operator.itemgetter(i), stacked) for i in range(count))
