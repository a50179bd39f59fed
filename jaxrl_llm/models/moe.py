"""Mixture of experts: every token goes through the few feed-forward experts that its router picks.

No token is dropped: assignments are sorted by expert and each expert multiplies its own run of rows
(`jax.lax.ragged_dot`), whatever its length. Under a mesh (`jax.set_mesh`) with more than one device, each device sorts
its own tokens and multiplies them by the experts it holds; the partial sums are added over `expert` and `tensor`.

The choice of experts can be replayed (routing replay, arXiv 2510.11370): the gates are then recomputed from the
router's own logits at the given experts, so they stay differentiable while the discrete choice is the sampler's.
"""

import functools
import math

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxrl_llm import axes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import FeedForward, Linear
from jaxrl_llm.ops.fp8 import Fp8Sites, fake_quant


class ExpertLinear(nnx.Module):
    """One matrix per expert, kernel [experts, in, out]."""

    def __init__(self, size_in: int, size_out: int, config: ModelConfig, *, rngs: nnx.Rngs):
        shape = (config.moe.num_experts, size_in, size_out)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, config.param_dtype) / math.sqrt(size_in))


class Experts(nnx.Module):
    """SwiGLU experts, `moe.intermediate_size` wide inside."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        size = config.moe.intermediate_size
        self.gate = ExpertLinear(config.hidden_size, size, config, rngs=rngs)
        self.up = ExpertLinear(config.hidden_size, size, config, rngs=rngs)
        self.down = ExpertLinear(size, config.hidden_size, config, rngs=rngs)

    def __call__(self, x: jax.Array, experts: jax.Array, gates: jax.Array, fp8: Fp8Sites, tokens: P) -> jax.Array:
        """Gated sum [B, L, D] of the chosen experts' outputs; experts int32 and gates float32 [B, L, k]."""
        kernels = [layer.kernel[...].astype(x.dtype) for layer in (self.gate, self.up, self.down)]
        x = fake_quant(x, fp8.activations)
        mesh = axes.current()
        if mesh is None:
            return apply_experts(x, experts, gates, *kernels, fp8=fp8)
        count, _, width = kernels[0].shape
        expert, tensor = axes.even(count, mesh, axes.EXPERT), axes.even(width, mesh, axes.TENSOR)
        inputs = (tokens, tokens, tokens, P(expert, None, tensor), P(expert, None, tensor), P(expert, tensor))
        parts = tuple(axis for axis in (expert, tensor) if axis is not None)

        def local(x, experts, gates, *kernels):
            # Each of these devices sees its own experts' share of the gradient of x and gates. Said aloud, it is summed
            # over them; a gather at indices that differ by device does not say so by itself.
            x, gates = jax.lax.pcast((x, gates), parts, to="varying")
            first = 0 if expert is None else jax.lax.axis_index(expert) * kernels[0].shape[0]
            return jax.lax.psum(apply_experts(x, experts, gates, *kernels, first=first, fp8=fp8), parts)

        return jax.shard_map(local, in_specs=inputs, out_specs=tokens)(x, experts, gates, *kernels)


class MoE(nnx.Module):
    """Router and experts, and the expert that every token goes through where there is one."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config.moe
        shape = (config.hidden_size, config.moe.num_experts)
        # No `kernel`: FP8 engines leave the router alone, and so does the emulation.
        self.router = nnx.Param(jax.random.normal(rngs.params(), shape, config.param_dtype) / math.sqrt(shape[0]))
        self.experts = Experts(config, rngs=rngs)
        size = config.moe.shared_expert_size
        self.shared = FeedForward(size, config, rngs=rngs) if size else None
        self.shared_gate = Linear(config.hidden_size, 1, config, rngs=rngs) if size else None

    def __call__(self, x: jax.Array, replay: jax.Array | None, fp8: Fp8Sites, tokens: P) -> tuple[jax.Array, jax.Array]:
        """Routes every token.

        Args:
          x: [B, L, D].
          replay: int32 [B, L, k], experts to use in place of the router's choice, or None.
          fp8: emulated sites.
          tokens: how [B, L] is divided over the mesh, see `axes`.

        Returns:
          [B, L, D] and the experts used, int32 [B, L, k].
        """
        logits = jnp.matmul(x, self.router[...].astype(x.dtype), preferred_element_type=jnp.float32)
        gates, experts = route(logits, self.config.experts_per_token, self.config.norm_topk_prob, replay)
        y = self.experts(x, experts, gates, fp8, tokens)
        if self.shared is not None:
            y = y + jax.nn.sigmoid(self.shared_gate(x, fp8)) * self.shared(x, fp8)
        return y, experts


def route(logits: chex.Array, k: int, normalize: bool, replay: chex.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The k most probable experts and their gates.

    Args:
      logits: float32 [..., E].
      k: experts per token.
      normalize: gates are divided by their sum.
      replay: int32 [..., k], experts to take in place of the most probable ones, or None.

    Returns:
      Gates float32 [..., k], differentiable in `logits`, and experts int32 [..., k].
    """
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    if replay is None:
        gates, experts = jax.lax.top_k(probs, k)
    else:
        chex.assert_shape(replay, (*logits.shape[:-1], k))
        gates, experts = jnp.take_along_axis(probs, replay, axis=-1), replay
    if normalize:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    return gates, experts.astype(jnp.int32)


def apply_experts(
    x: chex.Array,
    experts: chex.Array,
    gates: chex.Array,
    gate: chex.Array,
    up: chex.Array,
    down: chex.Array,
    *,
    first: chex.Array | int = 0,
    fp8: Fp8Sites,
) -> jax.Array:
    """Sum over each token's experts of gate * down(silu(gate(x)) * up(x)), for the experts held here.

    Args:
      x: [B, L, D].
      experts, gates: int32 and float32 [B, L, k].
      gate, up: [E, D, F], the matrices of experts first .. first + E - 1; tokens' other experts contribute 0.
      down: [E, F, D].
      first: number of the first expert held here.
      fp8: emulated sites.

    Returns:
      [B, L, D] in the dtype of x.
    """
    count, k = gate.shape[0], experts.shape[-1]
    flat = experts.reshape(-1) - first
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)  # experts held elsewhere sort last
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=count + 1)[:count]
    dot = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    rows = x.reshape(-1, x.shape[-1])[order // k]
    inner = fake_quant(jax.nn.silu(dot(rows, gate)) * dot(rows, up), fp8.activations)
    here = (flat[order] < count)[:, None]  # what ragged_dot leaves in rows beyond its groups is not ours to trust
    out = jnp.where(here, dot(inner, down), 0) * gates.reshape(-1)[order][:, None]
    out = out[jnp.argsort(order)].reshape(*experts.shape, -1)
    return jnp.sum(out, axis=-2).astype(x.dtype)


def router_load(experts: chex.Array, mask: chex.Array, num_experts: int) -> jax.Array:
    """How evenly the router spreads tokens.

    Args:
      experts: int32 [B, L, layers, k].
      mask: bool [B, L], tokens that count.
      num_experts: E.

    Returns:
      float32 [layers, E], share of a layer's assignments that each expert gets (1 / E each when even; none is ever
      dropped, so they add up to 1); 0 where no token counts.
    """
    chex.assert_rank(experts, 4)
    chex.assert_shape(mask, experts.shape[:2])
    layers = experts.shape[2]
    weights = jnp.broadcast_to(mask[:, :, None, None], experts.shape).astype(jnp.float32)
    counts = jnp.zeros((layers, num_experts), jnp.float32).at[jnp.arange(layers)[:, None], experts].add(weights)
    return counts / jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1)
