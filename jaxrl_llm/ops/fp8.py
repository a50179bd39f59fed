"""Emulated FP8: quantise to float8 with a scale, clip before the cast, dequantise. Gradients pass straight through.

Use it to give a sampler (or a whole forward pass) the numerics of an FP8 engine on hardware that has none. A cast of a
value beyond the format's maximum gives NaN, hence the clip.
"""

import dataclasses
from typing import Literal

import chex
import jax
import jax.numpy as jnp

Format = Literal["off", "e4m3", "e5m2"]

DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
BLOCK = 128  # side of a weight block, as in block-scaled FP8 checkpoints


@dataclasses.dataclass(frozen=True)
class Fp8Sites:
    """Where FP8 is emulated, each site on its own.

    Attributes:
      logits: per-token scale, just before sampling.
      weights: matrices of the linear layers, from their bfloat16-rounded copy.
      activations: inputs of the linear layers, per-token scale.
      kv_cache: keys and values as they are written, per token and head.
      weight_scale: one scale per output channel, or per 128 x 128 block.
    """

    logits: Format = "off"
    weights: Format = "off"
    activations: Format = "off"
    kv_cache: Format = "off"
    weight_scale: Literal["channel", "block"] = "channel"

    @property
    def any(self) -> bool:
        """Whether some site is on."""
        return any(getattr(self, site) != "off" for site in ("logits", "weights", "activations", "kv_cache"))


def fake_quant(
    x: chex.Array, fmt: Format, axis: int | tuple[int, ...] = -1, amax: chex.Array | None = None
) -> jax.Array:
    """Rounds `x` to what FP8 with one scale per slice along `axis` can hold.

    Args:
      x: float array of any shape.
      fmt: number format; "off" returns `x` itself.
      axis: axes that share a scale (the scale maps their largest magnitude to the format's maximum).
      amax: that magnitude, of `x`'s shape without `axis`, where `x` is a part of what shares the scale.

    Returns:
      Same shape and dtype. The gradient is that of the identity.
    """
    if fmt == "off":
        return x
    dtype = DTYPES[fmt]
    top = float(jnp.finfo(dtype).max)
    wide = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(wide), axis=axis, keepdims=True) if amax is None else jnp.expand_dims(amax, axis)
    scale = jnp.where(amax > 0, amax / top, 1.0)
    # Rounding in amax / top may push the largest value just over the maximum, which the cast would turn into NaN.
    rounded = jnp.clip(wide / scale, -top, top).astype(dtype).astype(jnp.float32) * scale
    return x + jax.lax.stop_gradient(rounded.astype(x.dtype) - x)


def fake_quant_weight(w: chex.Array, fmt: Format, scale: Literal["channel", "block"] = "channel") -> jax.Array:
    """Rounds a matrix [..., in, out] to FP8, starting from its bfloat16 copy.

    An FP8 engine receives bfloat16 weights; quantising the float32 master instead would emulate another mismatch.

    Args:
      w: float [..., in, out].
      fmt: number format.
      scale: one scale per output channel, or per 128 x 128 block.
    """
    if fmt == "off":
        return w
    chex.assert_rank(w, {2, 3, 4})
    rounded = w.astype(jnp.bfloat16).astype(w.dtype)
    if scale == "channel":
        return fake_quant(rounded, fmt, axis=-2)
    *lead, rows, columns = w.shape
    pad = [(0, 0)] * len(lead) + [(0, -rows % BLOCK), (0, -columns % BLOCK)]
    blocks = jnp.pad(rounded, pad)
    blocks = blocks.reshape(*lead, blocks.shape[-2] // BLOCK, BLOCK, blocks.shape[-1] // BLOCK, BLOCK)
    blocks = fake_quant(blocks, fmt, axis=(-3, -1))
    return blocks.reshape(*lead, rows + -rows % BLOCK, columns + -columns % BLOCK)[..., :rows, :columns]
