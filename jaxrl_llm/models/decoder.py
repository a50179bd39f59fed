"""The decoder, top to bottom: embedding, blocks of token mixing and feed-forward, final norm, unembedding.

One set of parameters, stacked over layers, serves two forwards built from the same block: `hidden` scans over the
stack (training: small program, optional rematerialisation), `decode` runs the layers one by one against a cache
(sampling: no copy of a layer's weights per step). Architectures differ in `ModelConfig` fields only. Where layers of
different kinds take turns, the scan's step is one period of them.
"""

import operator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxrl_llm import axes
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.attention import Attention, rope_angles
from jaxrl_llm.models.cache import KeyValue, KVCache
from jaxrl_llm.models.config import LayerKind, ModelConfig
from jaxrl_llm.models.delta_net import DeltaNet, RecurrentState, init_state
from jaxrl_llm.models.kernels import cached_attention, causal_attention
from jaxrl_llm.models.layers import FeedForward, Linear, RMSNorm, matmul_transposed
from jaxrl_llm.models.moe import MoE
from jaxrl_llm.ops.fp8 import Fp8Sites

NO_FP8 = Fp8Sites()


class Layout(NamedTuple):
    """Where the tokens of a forward stand; the same for all layers.

    Attributes:
      rope: cosine and sine of the rotary embedding at the tokens' positions.
      attended: what each token attends to: for whole sequences the segment ids int32 [B, L] (earlier tokens of its own),
        against a cache a mask bool [B, Q, S].
      starts: bool [B, Q], tokens that begin a sequence.
      real: bool [B, Q], tokens that are not padding.
      tokens: how [B, Q] is divided over the mesh, see `axes`.
    """

    rope: tuple[jax.Array, jax.Array]
    attended: jax.Array
    starts: jax.Array
    real: jax.Array
    tokens: PartitionSpec


class Block(nnx.Module):
    """One layer: attention (or gated delta net) and feed-forward, each behind a norm and added to the residual stream.

    Both forwards return the experts that the tokens went through, int32 [B, L, k], last; None without a router.
    """

    def __init__(self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs):
        self.config, self.kind = config, kind
        self.attention_norm = RMSNorm(config.hidden_size, config)
        if kind.mixer == "linear_attention":
            self.delta_net = DeltaNet(config, rngs=rngs)
        else:
            self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config)
        sparse = kind.feed_forward == "moe"
        self.feed_forward = (
            MoE(config, rngs=rngs) if sparse else FeedForward(config.intermediate_size, config, rngs=rngs)
        )

    def __call__(self, x: jax.Array, layout: Layout, replay: jax.Array | None, fp8: Fp8Sites):
        """Whole sequences. Returns x and experts."""
        normed = self.attention_norm(x)
        if self.kind.mixer == "linear_attention":
            state = init_state(self.config, x.shape[0])
            mixed, _ = self.delta_net(normed, layout.starts, layout.real, state, fp8, layout.tokens)
        else:
            q, k, v = self.attention.project(normed, layout.rope, fp8)
            attended = causal_attention(q, k, v, layout.attended, self.config.attention)
            mixed = self.attention.finish(normed, attended, fp8)
        x, experts = self._feed_forward(x + mixed, replay, fp8, layout.tokens)
        return axes.by_columns(x, layout.tokens), experts

    def decode(self, x: jax.Array, layout: Layout, cached: KeyValue | RecurrentState, slots: jax.Array, fp8: Fp8Sites):
        """New tokens against this layer's part of the cache. Returns x, the part with the new tokens, and experts."""
        normed = self.attention_norm(x)
        if self.kind.mixer == "linear_attention":
            mixed, cached = self.delta_net(normed, layout.starts, layout.real, cached, fp8, layout.tokens)
        else:
            q, k, v = self.attention.project(normed, layout.rope, fp8)
            cached = cached.append(k, v, slots)
            attended = cached_attention(q, cached.keys, cached.values, layout.attended)
            mixed = self.attention.finish(normed, attended, fp8)
        x, experts = self._feed_forward(x + mixed, None, fp8, layout.tokens)
        return x, cached, experts

    def _feed_forward(self, x: jax.Array, replay: jax.Array | None, fp8: Fp8Sites, tokens: PartitionSpec):
        normed = self.feed_forward_norm(x)
        if self.kind.feed_forward == "dense":
            return x + self.feed_forward(normed, fp8), None
        y, experts = self.feed_forward(normed, replay, fp8, tokens)
        return x + y, experts


class Decoder(nnx.Module):
    """A causal language model.

    Attributes:
      embedding: [V, D].
      layers: a `Block` whose parameters carry a leading axis of `num_layers`; where kinds of layers take turns, one
        such block per place in the period (`block0`, `block1`, ...), with a leading axis of `num_layers / period`.
      norm: the final norm.
      head: [D, V], or None where the embedding is tied.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, config.param_dtype))

        def stack(kind):
            make = nnx.vmap(lambda rngs: Block(config, kind, rngs=rngs), in_axes=0, out_axes=0)
            return nnx.split_rngs(splits=config.num_layers // config.period)(make)(rngs)

        blocks = [stack(kind) for kind in config.layer_kinds[: config.period]]
        self.layers = blocks[0] if len(blocks) == 1 else nnx.Dict({f"block{i}": b for i, b in enumerate(blocks)})
        self.norm = RMSNorm(config.hidden_size, config)
        tied = config.tie_word_embeddings
        self.head = (
            None if tied else nnx.Param(0.02 * jax.random.normal(rngs.params(), shape[::-1], config.param_dtype))
        )

    def hidden(
        self,
        tokens: chex.Array,
        positions: chex.Array,
        segment_ids: chex.Array,
        fp8: Fp8Sites | None = None,
        routed_experts: chex.Array | None = None,
    ) -> jax.Array:
        """Final hidden states of whole sequences, for training and scoring; see `hidden_and_routing`."""
        return self.hidden_and_routing(tokens, positions, segment_ids, fp8, routed_experts)[0]

    def hidden_and_routing(
        self,
        tokens: chex.Array,
        positions: chex.Array,
        segment_ids: chex.Array,
        fp8: Fp8Sites | None = None,
        routed_experts: chex.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Final hidden states of whole sequences and the experts that the tokens went through.

        Args:
          tokens: int32 [B, L].
          positions: int32 [B, L], within each segment.
          segment_ids: int32 [B, L]; a token sees earlier tokens of its own segment, whose tokens are adjacent; 0 is
            padding.
          fp8: emulated sites (activations, kv_cache), straight-through gradients.
          routed_experts: int32 [B, L, MoE layers, experts per token], experts to use in place of the routers' choice.

        Returns:
          [B, L, D] in the model's dtype, after the final norm; undefined but finite at padding. And the experts used,
          shaped as `routed_experts`; None without routers.
        """
        chex.assert_rank([tokens, positions, segment_ids], 2)
        chex.assert_equal_shape([tokens, positions, segment_ids])
        c, fp8 = self.config, fp8 or NO_FP8
        starts = jnp.diff(segment_ids, axis=1, prepend=0) != 0
        divided = axes.whole_sequences(*tokens.shape)
        layout = Layout(rope_angles(positions, c), segment_ids, starts, segment_ids > 0, divided)
        repeats = c.num_layers // c.period
        routers = c.num_moe_layers // repeats  # in one period
        if routed_experts is not None:
            chex.assert_shape(routed_experts, (*tokens.shape, c.num_moe_layers, c.moe.experts_per_token))
            routed_experts = jnp.moveaxis(routed_experts, 2, 0)
            routed_experts = routed_experts.reshape(repeats, routers, *routed_experts.shape[1:])

        def layer(graphdef):
            def apply(params, x, replay):
                return nnx.merge(graphdef, params)(x, layout, replay, fp8)

            if c.remat == "none":
                return apply
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if c.remat == "dots" else None
            return jax.checkpoint(apply, policy=policy, prevent_cse=False)

        graphdefs, stacks = zip(*map(nnx.split, _period(self.layers, c.period)), strict=True)
        layers = [layer(graphdef) for graphdef in graphdefs]

        def period(x, inputs):
            params, replay = inputs
            chosen = []
            for apply, part, kind in zip(layers, params, c.layer_kinds, strict=False):
                given = replay[len(chosen)] if replay is not None and kind.feed_forward == "moe" else None
                x, experts = apply(part, x, given)
                chosen += [] if experts is None else [experts]
            return x, tuple(chosen)

        unroll = max(1, c.scan_unroll // c.period)
        x = self._embed(tokens, divided)
        x, chosen = jax.lax.scan(period, x, (stacks, routed_experts), unroll=unroll)
        if not chosen:
            return self.norm(x), None
        chosen = jnp.stack(chosen, axis=1)  # [repeats, routers, B, L, k]
        return self.norm(x), jnp.moveaxis(chosen.reshape(c.num_moe_layers, *chosen.shape[2:]), 0, 2)

    def decode(
        self,
        tokens: chex.Array,
        positions: chex.Array,
        cache: KVCache,
        slots: chex.Array,
        token_mask: chex.Array,
        fp8: Fp8Sites | None = None,
        layers: tuple[Any, ...] | None = None,
        rope: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states of new tokens given the cache; prefill (Q tokens) and single steps (Q = 1) alike.

        Args:
          tokens: int32 [B, Q].
          positions: int32 [B, Q], within each sequence; 0 at its first token.
          cache: filled before slot `slots`.
          slots: int32 [] or [B], the slot that column 0 is written to.
          token_mask: bool [B, Q]; False marks left padding, which nothing attends to.
          fp8: emulated sites.
          layers: per-layer parameters from `unstack_layers`, or None to slice them here.
          rope: `rope_angles` at the positions, or None to compute them here.

        Returns:
          Hidden states [B, Q, D] after the final norm, and the cache with the new tokens.
        """
        chex.assert_equal_shape([tokens, positions, token_mask])
        c, fp8 = self.config, fp8 or NO_FP8
        valid = caches.write(cache.valid, token_mask, slots)
        # Slots are ordered in time, so a query sees the valid slots up to its own.
        own = jnp.reshape(slots, (-1, 1)) + jnp.arange(tokens.shape[1])
        mask = valid[:, None, :] & (jnp.arange(cache.length) <= own[:, :, None])
        divided = axes.decoded_sequences(len(tokens))
        rope = rope_angles(positions, c) if rope is None else rope
        layout = Layout(rope, mask, token_mask & (positions == 0), token_mask, divided)
        graphdefs, stacks = zip(*map(nnx.split, _period(self.layers, c.period)), strict=True)
        ready, layers = layers is not None, _unstack(stacks) if layers is None else layers
        x, parts, chosen = self._embed(tokens, divided), [], []
        for i, params in enumerate(layers):
            block = nnx.merge(graphdefs[i % c.period], params)
            block.set_attributes(Linear, transposed=ready)
            x, part, experts = block.decode(x, layout, cache.layers[i], slots, fp8)
            parts.append(part)
            chosen += [] if experts is None else [experts]
        routed = cache.routed_experts
        if routed is not None and chosen:
            routed = caches.write(routed, jnp.stack(chosen, axis=2), slots)
        return self.norm(x), KVCache(tuple(parts), valid, routed)

    def unembedding(self) -> jax.Array:
        """[D, V] in the model's dtype."""
        matrix = self.embedding[...].T if self.head is None else self.head[...]
        return matrix.astype(self.config.dtype)

    def logits(self, hidden: chex.Array) -> jax.Array:
        """float32 [..., V]."""
        if self.head is None and hidden.ndim == 2:
            return matmul_transposed(hidden, self.embedding[...].astype(self.config.dtype), jnp.float32)
        return jnp.matmul(hidden, self.unembedding(), preferred_element_type=jnp.float32)

    def _embed(self, tokens: chex.Array, divided: PartitionSpec) -> jax.Array:
        table = axes.along_vocabulary(self.embedding[...].astype(self.config.dtype), divided)
        return axes.by_columns(table[tokens], divided)


def unstack_layers(params: nnx.State) -> tuple[Any, ...]:
    """The stacked layers of a decoder's parameters as a tuple of per-layer trees, for `Decoder.decode`.

    The matrices of `Linear` are transposed, as decoding wants them; see `is_matrix`.
    """
    layers = params["layers"]
    period = len(layers) if "block0" in layers else 1

    def turned(path, leaf):
        return leaf.T if is_matrix(path, leaf) else leaf

    return jax.tree_util.tree_map_with_path(turned, _unstack(_period(layers, period)))


def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether a parameter of one layer (or its shape) is the matrix of a `Linear`; those of experts have a dimension more."""
    return jax.tree_util.DictKey("kernel") in path and leaf.ndim == 2


def narrow(params: Any, dtype: Any) -> Any:
    """A decoder's parameters (or parts of them) with those in `dtype` that its forward brings to the activations' dtype.

    Norms and the rates of delta nets stay as they are: they are computed with in float32.
    """
    multiplied = {jax.tree_util.DictKey(name) for name in ("embedding", "head", "kernel", "bias", "router", "conv")}

    def one(path, leaf):
        return leaf.astype(dtype) if multiplied.intersection(path) else leaf

    return jax.tree_util.tree_map_with_path(one, params)


def _period(layers: Any, period: int) -> tuple[Any, ...]:
    """The stacked blocks (or their parameters) of one period, in order."""
    return (layers,) if period == 1 else tuple(layers[f"block{i}"] for i in range(period))


def _unstack(stacks: tuple[Any, ...]) -> tuple[Any, ...]:
    """Per-layer trees, in order of the layers, from the period's stacks."""
    repeats = jax.tree.leaves(stacks[0])[0].shape[0]
    return tuple(jax.tree.map(operator.itemgetter(i), stack) for i in range(repeats) for stack in stacks)
