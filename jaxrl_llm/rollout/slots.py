"""The device's part of sampling: what the decoding loop carries, and the programs that change it.

`prefill` runs prompts through the model, `insert` lets sequences start from them, `decode` draws tokens until enough
sequences are finished, `arrange` keeps some rows and makes room. All rows write to the same column of the cache, and a
sequence that starts later has its prompt placed just before that column: one offset serves rows of any age, so a step
updates the cache with one slice, and room is needed for the oldest sequence alone. On a mesh every device has rows of its
own (`placement`).
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm import schema
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.attention import rope_angles
from jaxrl_llm.models.cache import KVCache
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import narrow, unstack_layers
from jaxrl_llm.ops.fp8 import Fp8Sites
from jaxrl_llm.rollout import placement
from jaxrl_llm.rollout.choice import Choice, behavior_distribution, draw, entropy, random_numbers
from jaxrl_llm.rollout.emulate import quantize_weights
from jaxrl_llm.rollout.placement import Loaded
from jaxrl_llm.types import TopKView


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
      slots: sequences decoded at once, the others wait for a place; 0 for all of them. On a mesh it is rounded up to a
        multiple of the devices that divide the rows.
      gather_params: on a mesh, decode with parameters gathered over its `fsdp` axis (`placement.gather`).
      first_chunk: tokens that the first cache has room for; each larger cache adds twice as many as the last.
    """

    max_response_length: int
    stop_ids: tuple[int, ...]
    pad_id: int = 0
    choice: Choice = dataclasses.field(default_factory=Choice)
    capture_top_k: int = 0
    capture_entropy: bool = False
    capture_routing: bool = False
    fp8: Fp8Sites = dataclasses.field(default_factory=Fp8Sites)
    slots: int = 0
    gather_params: bool = True
    first_chunk: int = 32

    def __post_init__(self):
        for name in ("max_response_length", "first_chunk"):
            value = getattr(self, name)
            schema.require(value > 0 and not isinstance(value, bool), name, value, "a positive integer")
        for name in ("capture_top_k", "slots"):
            value = getattr(self, name)
            schema.require(value >= 0 and not isinstance(value, bool), name, value, "an integer of 0 or more")


@flax.struct.dataclass
class Prefilled:
    """Prompts that sequences can start from, M of them, P tokens wide.

    Attributes:
      hidden: [M, D], final hidden state of the last prompt token.
      cache: keys and values, P slots.
      lengths: int32 [M].
    """

    hidden: jax.Array
    cache: KVCache
    lengths: jax.Array


@flax.struct.dataclass
class Slots:
    """R sequences under way.

    Attributes:
      hidden: [R, D], final hidden state of the newest token, from which the next one is drawn.
      cache: keys and values of prompt and response, C slots.
      column: int32 [], the cache slot that comes next in every row.
      keys: PRNG key of each row, [R].
      prompt_lengths: int32 [R].
      steps: int32 [R], response tokens so far.
      limits: int32 [R], response tokens at most.
      done: bool [R], nothing more to draw; the row is free.
    """

    hidden: jax.Array
    cache: KVCache
    column: jax.Array
    keys: jax.Array
    prompt_lengths: jax.Array
    steps: jax.Array
    limits: jax.Array
    done: jax.Array


@flax.struct.dataclass
class Record:
    """What one chunk of W steps drew, step by step; a row's first entries, as many as it advanced, are real.

    Attributes:
      tokens: int32 [R, W].
      logprobs: float32 [R, W], of the drawn token.
      log_kept_mass: float32 [R, W].
      topk: [R, W, K], or None.
      entropy: float32 [R, W], nats, or None.
      routing: int32 [R, W, MoE layers, experts per token], experts that the drawn token went through, or None.
    """

    tokens: jax.Array
    logprobs: jax.Array
    log_kept_mass: jax.Array
    topk: TopKView | None
    entropy: jax.Array | None
    routing: jax.Array | None


@functools.partial(jax.jit, static_argnames=("fp8", "dtype"))
def load(params: Any, fp8: Fp8Sites, dtype: Any) -> Loaded:
    """The parameters as the sampler uses them: one tree per layer, quantised where emulated, as wide as decoding multiplies.

    A model that is trained in float32 and computes in bfloat16 would narrow its matrices at every step; done once, the numbers
    are the same, and the copy, what is gathered for it and what a step reads are half as large.

    Args:
      params: the decoder's. The stacked layers among them stay as they are: decoding does not read them.
      fp8: emulated sites.
      dtype: that the model computes in.
    """
    layers = narrow(unstack_layers(quantize_weights(params, fp8)), dtype)
    stack = params["layers"]
    params = narrow(params, dtype)
    params["layers"] = stack
    return Loaded(params, layers)


@functools.partial(jax.jit, static_argnames=("model", "rows", "length", "routing"))
def empty(model: ModelConfig, rows: int, length: int, column: int, routing: bool = False) -> Slots:
    """`rows` free rows with a cache of `length` slots, which remembers experts with `routing`."""
    slots = Slots(
        hidden=jnp.zeros((rows, model.hidden_size), model.dtype),
        cache=caches.init_cache(model, rows, length, record_routing=routing),
        column=jnp.int32(column),
        keys=jax.random.split(jax.random.key(0), rows),
        prompt_lengths=jnp.zeros(rows, jnp.int32),
        steps=jnp.zeros(rows, jnp.int32),
        limits=jnp.zeros(rows, jnp.int32),
        done=jnp.ones(rows, bool),
    )
    return placement.divide(slots)


@functools.partial(jax.jit, static_argnames=("graphdef", "model", "fp8", "routing"))
def prefill(
    graphdef: nnx.GraphDef,
    model: ModelConfig,
    fp8: Fp8Sites,
    loaded: Loaded,
    tokens: jax.Array,
    mask: jax.Array,
    routing: bool = False,
) -> Prefilled:
    """Runs left-padded prompts, int32 and bool [M, P], through the model."""
    tokens, mask = placement.divide((tokens, mask))
    count, width = tokens.shape
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0).astype(jnp.int32)
    hidden, cache = nnx.merge(graphdef, loaded.params).decode(
        tokens,
        positions,
        placement.divide(caches.init_cache(model, count, width, record_routing=routing)),
        jnp.int32(0),
        mask,
        fp8,
        loaded.layers,
    )
    return placement.divide(Prefilled(hidden[:, -1], cache, jnp.sum(mask, axis=1, dtype=jnp.int32)))


@functools.partial(jax.jit, donate_argnames="slots")
def insert(
    slots: Slots, prompts: Prefilled, source: jax.Array, key: jax.Array, seeds: jax.Array, limits: jax.Array
) -> Slots:
    """Starts a sequence in every row whose `source` int32 [R] names a prompt; -1 leaves the row as it is.

    Args:
      slots: `column` at least P.
      prompts: where the sequences start.
      source: int32 [R].
      key: of the rollout.
      seeds, limits: uint32 and int32 [R], of the sequences that start.
    """
    fresh, take = source >= 0, jnp.maximum(source, 0)
    width = prompts.cache.length
    start = slots.column - width

    def place(axis, buffer, new):
        old = buffer if axis is None else jax.lax.dynamic_slice_in_dim(buffer, start, width, axis)
        mixed = jnp.where(fresh.reshape(-1, *[1] * (buffer.ndim - 1)), new[take], old)
        return mixed if axis is None else jax.lax.dynamic_update_slice_in_dim(buffer, mixed, start, axis)

    cleared = slots.cache.replace(valid=slots.cache.valid & ~fresh[:, None])
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, seeds)
    slots = slots.replace(
        hidden=jnp.where(fresh[:, None], prompts.hidden[take], slots.hidden),
        cache=caches.map_arrays(place, cleared, prompts.cache),
        keys=jnp.where(fresh, keys, slots.keys),
        prompt_lengths=jnp.where(fresh, prompts.lengths[take], slots.prompt_lengths),
        steps=jnp.where(fresh, 0, slots.steps),
        limits=jnp.where(fresh, limits, slots.limits),
        done=jnp.where(fresh, False, slots.done),
    )
    return placement.divide(slots)


@functools.partial(jax.jit, static_argnames="length")
def arrange(slots: Slots, rows: jax.Array, column: jax.Array, length: int) -> Slots:
    """Keeps `rows` int32 [R'] and moves every row's newest column to just before `column`, in `length` slots."""
    shift = slots.column - column

    def move(axis, x):
        if axis is None:
            return x[rows]
        # Columns before the first and behind the last are empty; what is pushed out belongs to no sequence. With the rows
        # picked last, XLA on CPU writes the new cache in one pass; picked first, it makes the picked one as well.
        pad = [(length, length) if i == axis else (0, 0) for i in range(x.ndim)]
        return jax.lax.dynamic_slice_in_dim(jnp.pad(x, pad), length + shift, length, axis)[rows]

    per_row = {
        name: getattr(slots, name)[rows] for name in ("hidden", "keys", "prompt_lengths", "steps", "limits", "done")
    }
    cache = caches.map_arrays(move, slots.cache)
    return placement.divide(slots.replace(cache=cache, column=column, **per_row))


@functools.partial(jax.jit, static_argnames=("graphdef", "config", "width"), donate_argnames="slots")
def decode(
    graphdef: nnx.GraphDef,
    config: SamplingConfig,
    loaded: Loaded,
    slots: Slots,
    steps: jax.Array,
    finished: jax.Array,
    width: int,
) -> tuple[Slots, Record]:
    """Draws tokens for at most `steps` steps, or until `finished` rows are done.

    Args:
      graphdef: the decoder without parameters.
      config: how to sample.
      loaded: from `load`.
      slots: R rows with at least `steps` free columns.
      steps, finished: int32 [].
      width: W, at least `steps`.
    """
    model = nnx.merge(graphdef, loaded.params)
    rows, top_k = slots.done.shape[0], config.capture_top_k
    numbers = jnp.zeros((rows, width), jnp.float32)
    view = (rows, width, top_k)
    record = Record(
        tokens=jnp.zeros((rows, width), jnp.int32),
        logprobs=numbers,
        log_kept_mass=numbers,
        topk=TopKView(jnp.zeros(view, jnp.int32), jnp.zeros(view, jnp.float32)) if top_k else None,
        entropy=numbers if config.capture_entropy else None,
        routing=_routing_buffer(slots.cache, width),
    )

    # For the whole chunk at once: step by step they take dozens of operations too small to be worth their start.
    uniform = placement.divide(random_numbers(slots.keys, slots.steps[:, None] + jnp.arange(width)))
    # Looked up in every step: what is computed there, XLA computes anew in every layer and for every head.
    turns = rope_angles(jnp.arange(slots.cache.length), model.config)

    def more(carry):
        step, slots, _ = carry
        return (step < steps) & (jnp.sum(slots.done) < finished)

    def body(carry):
        step, slots, record = carry
        now = jax.lax.dynamic_index_in_dim(uniform, step, axis=1, keepdims=False)
        slots, drawn = _step(model, loaded.layers, config, slots, now, turns)
        record = jax.tree.map(
            lambda buffer, new: jax.lax.dynamic_update_index_in_dim(buffer, new, step, axis=1), record, drawn
        )
        return step + 1, slots, record

    start = jnp.int32(0), slots, placement.divide(record)
    _, slots, record = jax.lax.while_loop(more, body, start)
    return placement.divide((slots, record))


def _step(
    model: nnx.Module,
    layers: Any,
    config: SamplingConfig,
    slots: Slots,
    uniform: jax.Array,
    turns: tuple[jax.Array, ...],
) -> tuple[Slots, Record]:
    """Draws one token for every row and runs it through the model; [R, ...] of each record.

    Args:
      model, layers, config, slots: as in `decode`.
      uniform: [R, 2], what the tokens are drawn by.
      turns: `rope_angles` at every position, [C, 1, rotary_dim / 2].
    """
    choice = config.choice

    def chosen(logits, uniform):
        distribution = behavior_distribution(logits, choice, config.capture_top_k)
        token = draw(distribution, uniform, choice).astype(jnp.int32)
        return Record(
            tokens=token,
            logprobs=jnp.take_along_axis(distribution.logprobs, token[:, None], axis=1)[:, 0],
            log_kept_mass=distribution.log_kept_mass,
            topk=distribution.topk,
            entropy=entropy(distribution) if config.capture_entropy else None,
            routing=None,
        )

    # On CPU the product comes out with its rows last. Unless it is turned here, every reader turns it for itself.
    logits = jax.lax.optimization_barrier(model.logits(slots.hidden))
    record = placement.by_rows(chosen, logits, uniform)
    token = record.tokens
    positions = (slots.prompt_lengths + slots.steps)[:, None]
    rope = tuple(turn[positions] for turn in turns)
    hidden, cache = model.decode(
        token[:, None], positions, slots.cache, slots.column, ~slots.done[:, None], config.fp8, layers, rope
    )
    if cache.routed_experts is not None:
        record = dataclasses.replace(
            record, routing=jax.lax.dynamic_index_in_dim(cache.routed_experts, slots.column, axis=1, keepdims=False)
        )
    steps = slots.steps + ~slots.done
    stopped = jnp.isin(token, jnp.array(config.stop_ids, jnp.int32))
    slots = slots.replace(
        hidden=hidden[:, 0],
        cache=cache,
        column=slots.column + 1,
        steps=steps,
        done=slots.done | stopped | (steps >= slots.limits),
    )
    return placement.divide(slots), record


def _routing_buffer(cache: KVCache, width: int) -> jax.Array | None:
    if cache.routed_experts is None:
        return None
    rows, _, *shape = cache.routed_experts.shape
    return jnp.zeros((rows, width, *shape), jnp.int32)
