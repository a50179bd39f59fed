"""Gated delta net: linear attention whose memory forgets and corrects itself (Yang 2024, arXiv 2412.06464).

Each value head keeps a matrix S [key_dim, value_dim]. A token decays it and writes the part of its value that its key
does not already retrieve, at rate beta; the query then reads:

    S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   o = S^T q

`recurrent` is that, one token at a time, for decoding. `chunked` is the same map for whole sequences: within a chunk the
corrections solve one triangular system (the WY form of arXiv 2406.06484), and only the memory passes from chunk to chunk.

Sequences packed into one row do not see each other: `segment` counts the sequences begun so far in the given tokens, and
memory and convolution are read within one number only; number 0 goes on from the state that was passed in.
"""

import math

import chex
import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxrl_llm import axes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import Linear, RMSNorm
from jaxrl_llm.ops.fp8 import Fp8Sites


@flax.struct.dataclass
class RecurrentState:
    """What a gated delta net keeps of the tokens seen so far.

    Attributes:
      conv: [B, conv_size - 1, channels], the last inputs of the convolution, in the model's dtype.
      memory: float32 [B, value_heads, key_dim, value_dim].
    """

    conv: jax.Array
    memory: jax.Array


def init_state(config: ModelConfig, batch: int) -> RecurrentState:
    """Nothing seen yet."""
    c = config.delta_net
    return RecurrentState(
        conv=jnp.zeros((batch, c.conv_size - 1, c.channels), config.dtype),
        memory=jnp.zeros((batch, c.num_value_heads, c.key_head_dim, c.value_head_dim), jnp.float32),
    )


class DeltaNet(nnx.Module):
    """Projections, short convolution, gated delta rule, gated norm, output projection."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, width = config.delta_net, config.hidden_size
        self.config = c
        self.qkv = Linear(width, c.channels, config, rngs=rngs)
        self.output_gate = Linear(width, c.value_width, config, rngs=rngs)
        self.beta = Linear(width, c.num_value_heads, config, rngs=rngs)
        self.decay = Linear(width, c.num_value_heads, config, rngs=rngs)
        shape = (c.conv_size, c.channels)
        self.conv = nnx.Param(jax.random.normal(rngs.params(), shape, config.param_dtype) / math.sqrt(c.conv_size))
        # Decay rates between slow and fast, as published.
        rates = jax.random.uniform(rngs.params(), (c.num_value_heads,), config.param_dtype, 0.01, 16.0)
        self.log_rate = nnx.Param(jnp.log(rates))
        self.decay_bias = nnx.Param(jnp.ones(c.num_value_heads, config.param_dtype))
        self.norm = RMSNorm(c.value_head_dim, config, zero_centred=False)
        self.out = Linear(c.value_width, width, config, rngs=rngs)

    def __call__(
        self, x: jax.Array, starts: jax.Array, mask: jax.Array, state: RecurrentState, fp8: Fp8Sites, tokens: P
    ) -> tuple[jax.Array, RecurrentState]:
        """Mixes tokens along the sequence.

        Args:
          x: [B, L, D].
          starts: bool [B, L], tokens that begin a new sequence.
          mask: bool [B, L]; False marks padding, which stands before a sequence or after its end.
          state: of the tokens before.
          fp8: emulated sites (activations).
          tokens: how [B, L] is divided over the mesh, see `axes`. Columns are brought together for what runs along
            them, which is divided by channels and heads instead.

        Returns:
          [B, L, D] and the state after the last token.
        """
        c = self.config
        x = jnp.where(mask[..., None], x, 0)
        segment = jnp.cumsum(starts, axis=1)
        qkv, conv = causal_conv(
            axes.by_heads(self.qkv(x, fp8), tokens), self.conv[...].astype(x.dtype), segment, state.conv
        )
        q, k, v = jnp.split(jax.nn.silu(qkv).astype(jnp.float32), [c.key_width, 2 * c.key_width], axis=-1)
        shared = c.num_value_heads // c.num_key_heads  # adjacent value heads share a key head
        q, k = (jnp.repeat(normalize(heads(y, c.num_key_heads)), shared, axis=2) for y in (q, k))
        v = heads(v, c.num_value_heads)
        beta = jax.nn.sigmoid(self.beta(x, fp8).astype(jnp.float32))
        decay = jax.nn.softplus(self.decay(x, fp8).astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32))
        decay = -jnp.exp(self.log_rate[...].astype(jnp.float32)) * decay
        beta, decay = (jnp.where(mask[..., None], y, 0.0) for y in (beta, decay))
        rule = recurrent if x.shape[1] == 1 else chunked
        q, k, v, decay, beta = (axes.by_heads(y, tokens) for y in (q / math.sqrt(c.key_head_dim), k, v, decay, beta))
        y, memory = rule(q, k, v, decay, beta, segment, state.memory)
        y = axes.by_columns(axes.by_heads(y, tokens), tokens)
        gate = heads(self.output_gate(x, fp8).astype(jnp.float32), c.num_value_heads)
        y = (self.norm(y) * jax.nn.silu(gate)).astype(x.dtype)
        return self.out(y.reshape(*x.shape[:2], c.value_width), fp8), RecurrentState(conv, memory)


def causal_conv(
    x: chex.Array, kernel: chex.Array, segment: chex.Array, previous: chex.Array
) -> tuple[jax.Array, jax.Array]:
    """Depthwise convolution over each token and the few before it in its sequence.

    Args:
      x: [B, L, C].
      kernel: [K, C]; the last row weighs the token itself.
      segment: int32 [B, L].
      previous: [B, K - 1, C], inputs before these, of sequence number 0.

    Returns:
      [B, L, C], and the last K - 1 inputs of the last token's sequence (0 where it has fewer).
    """
    size, length = kernel.shape[0], x.shape[1]
    x = jnp.concatenate([previous.astype(x.dtype), x], axis=1)
    numbers = jnp.pad(segment, [(0, 0), (size - 1, 0)])

    def seen(start, width, by):
        columns = slice(start, start + width)
        return jnp.where((numbers[:, columns] == by)[..., None], x[:, columns], 0)

    y = sum(seen(i, length, segment) * kernel[i] for i in range(size))
    return y, seen(length, size - 1, segment[:, -1:])


def recurrent(q, k, v, decay, beta, segment, memory) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule for one token (L = 1); arguments and results as of `chunked`."""
    q, k, v, decay, beta = (y[:, 0] for y in (q, k, v, decay, beta))
    kept = jnp.where(segment[:, :1] == 0, jnp.exp(decay), 0.0)
    memory = memory * kept[..., None, None]
    correction = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", memory, k))
    memory = memory + k[..., :, None] * correction[..., None, :]
    return jnp.einsum("bhkv,bhk->bhv", memory, q)[:, None], memory


def chunked(q, k, v, decay, beta, segment, memory, size: int = 64) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule for whole sequences.

    Args:
      q, k: float32 [B, L, H, key_dim].
      v: float32 [B, L, H, value_dim].
      decay: float32 [B, L, H], g <= 0.
      beta: float32 [B, L, H], in [0, 1].
      segment: int32 [B, L], sequences begun so far.
      memory: float32 [B, H, key_dim, value_dim], of sequence number 0.
      size: tokens per chunk.

    Returns:
      float32 [B, L, H, value_dim], and the memory after the last token.
    """
    chex.assert_equal_shape([q, k])
    length = q.shape[1]
    size = min(size, length)
    fill = -length % size

    def chunks(y):  # [B, L, H, ...] -> [chunks, B, H, size, ...]
        y = jnp.pad(y, [(0, 0), (0, fill)] + [(0, 0)] * (y.ndim - 2))
        y = y.reshape(y.shape[0], -1, size, *y.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(y, 3, 2), 1, 0)

    q, k, v, decay, beta = map(chunks, (q, k, v, decay, beta))
    number = jnp.pad(segment, [(0, 0), (0, fill)], mode="edge").reshape(len(segment), -1, size)
    number = jnp.moveaxis(number, 1, 0)[:, :, None]  # [chunks, B, 1, size]
    before = jnp.concatenate([jnp.zeros_like(number[:1, ..., -1:]), number[:-1, ..., -1:]])  # of the memory read
    after = number[..., -1:]

    total = jnp.cumsum(decay, axis=-1)
    to_end = jnp.where(number == after, jnp.exp(total[..., -1:] - total), 0.0)
    from_start = jnp.where(number == before, jnp.exp(total), 0.0)
    kept = jnp.where(after == before, jnp.exp(total[..., -1:]), 0.0)
    causal = jnp.tril(jnp.ones((size, size), bool)) & (number[..., :, None] == number[..., None, :])
    # Forbidden pairs would have positive exponents: replaced before exp, for the gradient's sake.
    between = jnp.where(causal, total[..., :, None] - total[..., None, :], 0.0)
    between = jnp.where(causal, jnp.exp(between), 0.0)

    # Token i's correction leaves out what earlier corrections of the chunk retrieve: (I + A) correction = its own part.
    system = beta[..., None] * (k @ k.mT) * between
    own = jnp.concatenate([beta[..., None] * v, (beta * from_start)[..., None] * k], axis=-1)
    solved = jax.lax.linalg.triangular_solve(system, own, left_side=True, lower=True, unit_diagonal=True)
    written, read = jnp.split(solved, [v.shape[-1]], axis=-1)
    attention = (q @ k.mT) * between

    def step(memory, chunk):
        q, k, attention, written, read, kept = chunk
        correction = written - read @ memory
        return memory * kept[..., None] + k.mT @ correction, q @ memory + attention @ correction

    inputs = (q * from_start[..., None], k * to_end[..., None], attention, written, read, kept)
    memory, out = jax.lax.scan(step, memory, inputs)
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3)  # [B, chunks, size, H, value_dim]
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length], memory


def heads(x: jax.Array, count: int) -> jax.Array:
    """[B, L, count * width] -> [B, L, count, width]."""
    return x.reshape(*x.shape[:2], count, -1)


def normalize(x: jax.Array) -> jax.Array:
    """x to length 1 along the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
