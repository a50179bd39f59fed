"""Grouped-query attention with rotary positions (Su 2021, arXiv 2104.09864), its output gated where configured."""

import math

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.models.layers import Linear, RMSNorm
from jaxrl_llm.ops.fp8 import Fp8Sites, fake_quant


class Attention(nnx.Module):
    """Grouped-query attention; with `attention_gate`, out(sigmoid(output_gate(x)) * attended)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        width, bias = c.hidden_size, c.attention_bias
        self.query = Linear(width, c.num_heads * c.head_dim, c, bias=bias, rngs=rngs)
        self.key = Linear(width, c.num_kv_heads * c.head_dim, c, bias=bias, rngs=rngs)
        self.value = Linear(width, c.num_kv_heads * c.head_dim, c, bias=bias, rngs=rngs)
        self.out = Linear(c.num_heads * c.head_dim, width, c, rngs=rngs)
        gated = c.attention_gate
        self.output_gate = Linear(width, c.num_heads * c.head_dim, c, bias=bias, rngs=rngs) if gated else None
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

    def finish(self, x: jax.Array, attended: jax.Array, fp8: Fp8Sites) -> jax.Array:
        """[B, L, D] from the attended values [B, L, heads, head_dim]; x [B, L, D] is what `project` got."""
        y = attended.reshape(*attended.shape[:2], attended.shape[2] * attended.shape[3])
        if self.output_gate is not None:
            y = y * jax.nn.sigmoid(self.output_gate(x, fp8))
        return self.out(y, fp8)


def rope_angles(positions: chex.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine float32 [..., 1, rotary_dim / 2] of the rotary embedding at `positions`."""
    exponent = jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32) / config.rotary_dim
    frequencies = _scale_frequencies(config.rope_theta**-exponent, config.rope_scaling)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the first rotary_dim of x [B, L, heads, head_dim], pairing component i with i + rotary_dim / 2."""
    cos, sin = rope
    half = cos.shape[-1]
    a, b, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


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
