"""The small layers that every block is made of: norm, linear map, gated feed-forward."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm import axes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.ops.fp8 import Fp8Sites, fake_quant


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32; a zero-centred one scales by 1 + scale."""

    def __init__(self, size: int, config: ModelConfig, *, zero_centred: bool | None = None):
        self.zero_centred = config.zero_centred_norm if zero_centred is None else zero_centred
        start = jnp.zeros if self.zero_centred else jnp.ones
        self.scale = nnx.Param(start(size, config.param_dtype))
        self.eps = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * (self.scale[...].astype(jnp.float32) + self.zero_centred)).astype(x.dtype)


FEW_ROWS = 64  # up to here packing a matrix costs more than turning the result


def matmul_transposed(x: jax.Array, matrix: jax.Array, dtype: Any = None) -> jax.Array:
    """x @ matrix.T, [R, out] from x [R, in] and matrix [out, in]; `dtype` of the result.

    With as few rows as decoding has, the matrix stands on the left: on CPU, XLA packs what stands on the right anew at
    every product, which is as much work as the product with few rows. The barrier keeps it from turning the product round
    again. With as many as prefill has, its result, which then comes out with the rows last, would be dearer to read.
    """
    if x.shape[0] > FEW_ROWS:
        return jnp.matmul(x, matrix.T, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(jnp.matmul(matrix, x.T, preferred_element_type=dtype)).T


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`, kernel [in, out]; the input is rounded to FP8 where activations are emulated.

    Attributes:
      transposed: the kernel lies as [out, in], for decoding.
    """

    def __init__(self, size_in: int, size_out: int, config: ModelConfig, *, bias: bool = False, rngs: nnx.Rngs):
        scale = 1 / math.sqrt(size_in)
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (size_in, size_out), config.param_dtype))
        self.bias = nnx.Param(jnp.zeros(size_out, config.param_dtype)) if bias else None
        self.transposed = False

    def __call__(self, x: jax.Array, fp8: Fp8Sites) -> jax.Array:
        shape, x, kernel = x.shape, fake_quant(x, fp8.activations), self.kernel[...].astype(x.dtype)
        # Two dimensions: on CPU, XLA's weight gradient of a product with more is twice as slow. A mesh that divides the
        # second would have to gather it first.
        if self.transposed or axes.parts(axes.current(), axes.SEQUENCE) == 1:
            x = x.reshape(-1, shape[-1])
        y = matmul_transposed(x, kernel) if self.transposed else x @ kernel
        y = y if self.bias is None else y + self.bias[...].astype(x.dtype)
        return y.reshape(*shape[:-1], y.shape[-1])


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), `size` wide inside."""

    def __init__(self, size: int, config: ModelConfig, *, rngs: nnx.Rngs):
        self.gate = Linear(config.hidden_size, size, config, rngs=rngs)
        self.up = Linear(config.hidden_size, size, config, rngs=rngs)
        self.down = Linear(size, config.hidden_size, config, rngs=rngs)

    def __call__(self, x: jax.Array, fp8: Fp8Sites) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x, fp8)) * self.up(x, fp8), fp8)
