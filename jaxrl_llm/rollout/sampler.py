"""Sampling in-process, in bounded compiled chunks, with a record of the distribution every token was drawn from.

A prompt is prefilled once and its cache repeated for the group's samples. Decoding runs in chunks of growing length:
within one there is no host sync, between them the host looks whether anything is left to do and lets the cache grow, so
attention costs about the real length and the number of compiled programs is logarithmic in the longest response.

Randomness is per sequence: `fold_in(fold_in(key, seed of the sequence), position)`. The same prompt, key and seed give the
same completion whatever the batch holds beside it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm import schema
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.cache import KVCache
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import unstack_layers
from jaxrl_llm.ops.fp8 import Fp8Sites
from jaxrl_llm.rollout.choice import Choice, behavior_distribution, draw, entropy
from jaxrl_llm.rollout.emulate import quantize_weights
from jaxrl_llm.types import FinishReason, Rollout, TopKView


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How responses are sampled and what is recorded. Static under jit.

    Attributes:
      max_response_length: T; a response without an end token is cut there.
      stop_ids: ids that end a response; the end token belongs to it.
      pad_id: filler of unused positions; may equal an end id.
      choice: temperature, truncation, rounding of the logits.
      capture_top_k: K of the recorded top-K view; 0 for none.
      capture_entropy: record the entropy of each distribution.
      capture_routing: record the experts that every token went through, for the trainer to replay.
      fp8: emulation of weights, activations and cache (logits: `choice.fp8`).
      first_chunk: tokens decoded before the first look at what is finished; each chunk is twice as long as the last.
      prompt_multiple: prompts are padded to a multiple of this many tokens.
    """

    max_response_length: int
    stop_ids: tuple[int, ...]
    pad_id: int = 0
    choice: Choice = dataclasses.field(default_factory=Choice)
    capture_top_k: int = 0
    capture_entropy: bool = False
    capture_routing: bool = False
    fp8: Fp8Sites = dataclasses.field(default_factory=Fp8Sites)
    first_chunk: int = 32
    prompt_multiple: int = 4

    def __post_init__(self):
        for name in ("max_response_length", "first_chunk", "prompt_multiple"):
            value = getattr(self, name)
            schema.require(value > 0 and not isinstance(value, bool), name, value, "a positive integer")
        top_k = self.capture_top_k
        schema.require(top_k >= 0 and not isinstance(top_k, bool), "capture_top_k", top_k, "an integer of 0 or more")


@flax.struct.dataclass
class State:
    """What the decoding loop carries. B rows, T response positions.

    Attributes:
      hidden: [B, D], final hidden state of the newest token, from which the next one is drawn.
      cache: keys and values of prompt and response.
      keys: PRNG key of each row, [B].
      prompt_lengths: int32 [B].
      step: int32 [], response position that comes next.
      done: bool [B].
      lengths: int32 [B], response tokens so far.
      tokens, logprobs, log_kept_mass: [B, T], records.
      topk_ids, topk_logprobs: [B, T, K].
      entropy: [B, T], or None.
      prompt_width: P, static.
    """

    hidden: jax.Array
    cache: KVCache
    keys: jax.Array
    prompt_lengths: jax.Array
    step: jax.Array
    done: jax.Array
    lengths: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    log_kept_mass: jax.Array
    topk_ids: jax.Array
    topk_logprobs: jax.Array
    entropy: jax.Array | None
    prompt_width: int = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """`sampler(params, prompts, key) -> Rollout`. Hashable, without state of its own.

    Attributes:
      graphdef: the decoder without parameters.
      model: its architecture.
      config: how to sample.
    """

    graphdef: nnx.GraphDef
    model: ModelConfig
    config: SamplingConfig

    def __call__(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        key: jax.Array,
        *,
        group_size: int = 1,
        seeds: Sequence[int] | None = None,
        policy_step: int = 0,
    ) -> Rollout:
        """Samples `group_size` responses to every prompt.

        Args:
          params: the decoder's parameters.
          prompts: token ids, none of them empty.
          key: of this rollout.
          group_size: G.
          seeds: one integer per response (prompts x G, group-major); by default its index.
          policy_step: optimizer step of `params`, recorded.

        Returns:
          A `Rollout` of len(prompts) * G rows.

        Raises:
          ValueError: an empty prompt, K above the vocabulary, routing of a model without experts, or a number of seeds
            that does not fit; names it.
        """
        config = self.config
        schema.require(
            config.capture_top_k <= self.model.vocab_size,
            "capture_top_k",
            config.capture_top_k,
            f"at most the vocabulary's size, {self.model.vocab_size}",
        )
        schema.require(
            bool(self.model.num_moe_layers) or not config.capture_routing,
            "capture_routing",
            config.capture_routing,
            "False: the model has no experts",
        )
        rows = len(prompts) * group_size
        seeds = np.arange(rows) if seeds is None else np.asarray(seeds)
        schema.require(len(seeds) == rows, "seeds", len(seeds), f"one per response, {rows}")
        tokens, mask = self._pad(prompts)
        params = self._load(params)
        state = self._prefill(params, tokens, mask, key, seeds.astype(np.uint32), group_size)
        chunk, end = config.first_chunk, 0
        while end < config.max_response_length and not (end and bool(jnp.all(state.done))):
            end = min(end + chunk, config.max_response_length)
            state = self._decode(params, self._grow(state, tokens.shape[1] + end), end)
            chunk *= 2
        return self._rollout(tokens, mask, state, group_size, policy_step)

    def _pad(self, prompts) -> tuple[np.ndarray, np.ndarray]:
        """Left-padded tokens and mask, [prompts, P]."""
        for i, prompt in enumerate(prompts):
            schema.require(len(prompt) > 0, f"prompts[{i}]", list(prompt), "at least one token long")
        multiple = self.config.prompt_multiple
        width = -(-max(map(len, prompts), default=1) // multiple) * multiple
        tokens = np.full((len(prompts), width), self.config.pad_id, np.int32)
        mask = np.zeros((len(prompts), width), bool)
        for i, prompt in enumerate(prompts):
            tokens[i, width - len(prompt) :] = prompt
            mask[i, width - len(prompt) :] = True
        return tokens, mask

    @functools.partial(jax.jit, static_argnums=0)
    def _load(self, params):
        """The parameters in the sampler's layout: quantised where emulated, one tree per layer."""
        params = quantize_weights(params, self.config.fp8)
        return params, unstack_layers(params)

    @functools.partial(jax.jit, static_argnums=(0, 6))
    def _prefill(self, params, tokens, mask, key, seeds, group_size) -> State:
        params, layers = params
        model = nnx.merge(self.graphdef, params)
        count, width = tokens.shape
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0).astype(jnp.int32)
        cache = caches.init_cache(self.model, count, width, record_routing=self.config.capture_routing)
        hidden, cache = model.decode(tokens, positions, cache, jnp.int32(0), mask, self.config.fp8, layers)

        rows, length, top_k = count * group_size, self.config.max_response_length, self.config.capture_top_k
        return State(
            hidden=jnp.repeat(hidden[:, -1], group_size, axis=0),
            cache=caches.repeat(cache, group_size),
            keys=jax.vmap(lambda seed: jax.random.fold_in(key, seed))(seeds),
            prompt_lengths=jnp.repeat(jnp.sum(mask, axis=1, dtype=jnp.int32), group_size),
            step=jnp.int32(0),
            done=jnp.zeros(rows, bool),
            lengths=jnp.zeros(rows, jnp.int32),
            tokens=jnp.full((rows, length), self.config.pad_id, jnp.int32),
            logprobs=jnp.zeros((rows, length), jnp.float32),
            log_kept_mass=jnp.zeros((rows, length), jnp.float32),
            topk_ids=jnp.zeros((rows, length, top_k), jnp.int32),
            topk_logprobs=jnp.zeros((rows, length, top_k), jnp.float32),
            entropy=jnp.zeros((rows, length), jnp.float32) if self.config.capture_entropy else None,
            prompt_width=width,
        )

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def _grow(self, state: State, length: int) -> State:
        return state.replace(cache=caches.grow(state.cache, length))

    @functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
    def _decode(self, params, state: State, end: int) -> State:
        """Decodes up to response position `end`, or until every row is done."""
        params, layers = params
        model = nnx.merge(self.graphdef, params)
        return jax.lax.while_loop(
            lambda s: (s.step < end) & ~jnp.all(s.done), lambda s: self._step(model, layers, s), state
        )

    def _step(self, model, layers, state: State) -> State:
        """Draws one token for every row, records it, and runs it through the model."""
        distribution = behavior_distribution(model.logits(state.hidden), self.config.choice)
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.keys, state.step)
        token = draw(distribution, keys, self.config.choice).astype(jnp.int32)
        logprob = jnp.take_along_axis(distribution.logprobs, token[:, None], axis=1)[:, 0]

        def record(buffer, value):
            old = jax.lax.dynamic_index_in_dim(buffer, state.step, axis=1, keepdims=False)
            keep = state.done.reshape(-1, *[1] * (old.ndim - 1))
            return jax.lax.dynamic_update_index_in_dim(buffer, jnp.where(keep, old, value), state.step, axis=1)

        records = {
            "tokens": record(state.tokens, token),
            "logprobs": record(state.logprobs, logprob),
            "log_kept_mass": record(state.log_kept_mass, distribution.log_kept_mass),
        }
        if self.config.capture_top_k:
            values, ids = jax.lax.top_k(distribution.logprobs, self.config.capture_top_k)
            records |= {"topk_ids": record(state.topk_ids, ids), "topk_logprobs": record(state.topk_logprobs, values)}
        if self.config.capture_entropy:
            records["entropy"] = record(state.entropy, entropy(distribution))

        stopped = jnp.isin(token, jnp.array(self.config.stop_ids, jnp.int32))
        hidden, cache = model.decode(
            token[:, None],
            (state.prompt_lengths + state.step)[:, None],
            state.cache,
            state.prompt_width + state.step,
            ~state.done[:, None],
            self.config.fp8,
            layers,
        )
        return state.replace(
            hidden=hidden[:, 0],
            cache=cache,
            step=state.step + 1,
            done=state.done | stopped,
            lengths=state.lengths + ~state.done,
            **records,
        )

    def _rollout(self, tokens, mask, state: State, group_size: int, policy_step: int) -> Rollout:
        rows = len(tokens) * group_size
        positions = jnp.arange(self.config.max_response_length)
        topk = TopKView(state.topk_ids, state.topk_logprobs) if self.config.capture_top_k else None
        routing = state.cache.routed_experts
        if routing is not None:  # decoding ends early where every row is done
            extra = tokens.shape[1] + self.config.max_response_length - routing.shape[1]
            routing = jnp.pad(routing, [(0, 0), (0, extra), (0, 0), (0, 0)])
        return Rollout(
            prompt_tokens=np.repeat(tokens, group_size, axis=0),
            prompt_mask=np.repeat(mask, group_size, axis=0),
            response_tokens=state.tokens,
            response_mask=positions < state.lengths[:, None],
            finish_reason=jnp.where(state.done, FinishReason.STOP, FinishReason.LENGTH).astype(jnp.int32),
            behavior_logprobs=state.logprobs,
            group_ids=np.arange(rows, dtype=np.int32) // group_size,
            log_kept_mass=state.log_kept_mass,
            topk=topk,
            entropy=state.entropy,
            routed_experts=routing,
            policy_step=np.int32(policy_step),
        )
