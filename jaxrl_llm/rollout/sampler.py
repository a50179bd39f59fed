"""Sampling in-process by continuous batching, with a record of the distribution every token was drawn from.

A prompt is prefilled once and serves its whole group. `slots` sequences are decoded at once, in chunks without a host
sync. A chunk ends when its cache is full or when enough sequences are finished; then the host takes the records, gives
the free rows to sequences that wait, and lets the cache grow, so attention costs about the real length. When nobody waits
and most rows are finished, the rest goes on in a smaller batch.

Sizes come from short ladders (rows, prompt widths, cache lengths), so the number of compiled programs is bounded by their
product, whatever the lengths.

Randomness is per sequence: `fold_in(fold_in(key, seed of the sequence), position)`. The same prompt, key and seed give the
same completion whatever the number of slots and whatever the batch holds beside it.

On a mesh the rows are divided over the devices (`placement`). With several processes each one decodes the rows of its
devices, and all of them get the whole record.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxrl_llm import processes, schema
from jaxrl_llm.axes import round_up
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.rollout import placement
from jaxrl_llm.rollout import slots as programs
from jaxrl_llm.rollout.placement import Loaded
from jaxrl_llm.rollout.slots import Prefilled, SamplingConfig, Slots
from jaxrl_llm.types import FinishReason, Rollout, TopKView

FEWEST_ROWS = 8  # smaller batches are hardly faster
REFILL_SHARE = 4  # a chunk ends when one row in so many is free for those that wait


@dataclasses.dataclass
class Usage:
    """What a rollout took.

    Attributes:
      tokens: response tokens.
      row_steps: rows times decoding steps; tokens / row_steps of the work was of use.
      chunks: times that the host looked.
      prefilled: prompts run through the model, fillers included.
      programs: (rows, cache length) of the decoding programs used; a sampler compiles each once.
    """

    tokens: int = 0
    row_steps: int = 0
    chunks: int = 0
    prefilled: int = 0
    programs: set[tuple[int, int]] = dataclasses.field(default_factory=set)


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

    def load(self, params: Any) -> Loaded:
        """The parameters as sampling uses them, for several calls with the same ones."""
        with placement.use(placement.mesh_of(params)):
            loaded = programs.load(params, self.config.fp8, self.model.dtype)
        return placement.gather(loaded) if self.config.gather_params and placement.mesh_of(params) else loaded

    def __call__(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        key: jax.Array,
        *,
        group_size: int = 1,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        policy_step: int = 0,
        report: Callable[[int, Usage], None] | None = None,
    ) -> Rollout:
        """Samples `group_size` responses to every prompt.

        Args:
          params: the decoder's parameters, or what `load` made of them.
          prompts: token ids, none of them empty.
          key: of this rollout.
          group_size: G.
          seeds: one integer per response (prompts x G, group-major); by default its index.
          limits: most tokens of each response, 1 to T; by default T.
          policy_step: optimizer step of `params`, recorded.
          report: called after every chunk with the number of finished responses and the usage so far.

        Returns:
          A `Rollout` of len(prompts) * G rows, in host memory.

        Raises:
          ValueError: an empty prompt, K above the vocabulary, routing of a model without experts, or seeds or limits
            that do not fit; names it.
        """
        schema.require(
            self.config.capture_top_k <= self.model.vocab_size,
            "capture_top_k",
            self.config.capture_top_k,
            f"at most the vocabulary's size, {self.model.vocab_size}",
        )
        schema.require(
            bool(self.model.num_moe_layers) or not self.config.capture_routing,
            "capture_routing",
            self.config.capture_routing,
            "False: the model has no experts",
        )
        rows = len(prompts) * group_size
        seeds = np.arange(rows) if seeds is None else np.asarray(seeds)
        schema.require(len(seeds) == rows, "seeds", len(seeds), f"one per response, {rows}")
        longest = self.config.max_response_length
        limits = np.full(rows, longest) if limits is None else np.asarray(limits)
        schema.require(len(limits) == rows, "limits", len(limits), f"one per response, {rows}")
        fit = rows == 0 or 1 <= limits.min() <= limits.max() <= longest
        schema.require(fit, "limits", limits.tolist(), f"between 1 and max_response_length = {longest}")
        tokens, mask = pad(prompts, self.config.pad_id)
        loaded = params if isinstance(params, Loaded) else self.load(params)
        with placement.use(placement.mesh_of(loaded)):
            work = _Work(self, loaded, tokens, mask, key, seeds.astype(np.uint32), limits.astype(np.int32), group_size)
            while work.fill():
                work.decode()
                if report is not None:
                    report(work.finished, work.usage)
        return work.rollout(policy_step)


class _Work:
    """One rollout under way: which sequence each row holds, who waits, and what has been recorded."""

    def __init__(self, sampler: Sampler, loaded: Loaded, tokens, mask, key, seeds, limits, group_size: int):
        config = self.config = sampler.config
        self.graphdef, self.model = sampler.graphdef, sampler.model
        # What no program depends on is taken out, so that samplers which differ in it share theirs; weights are rounded
        # before they come to one.
        sites = dataclasses.replace(config.fp8, weights="off", weight_scale="channel")
        self.compiled = dataclasses.replace(
            config, slots=0, first_chunk=1, max_response_length=1, gather_params=True, fp8=sites
        )
        self.loaded, shards = loaded, placement.shards(placement.mesh_of(loaded))
        self.prompts, self.prompt_mask, self.key, self.group_size = tokens, mask, key, group_size
        self.seeds, self.limits = seeds, limits
        self.total, self.width = len(seeds), tokens.shape[1]
        self.usage, self.finished, self.waiting_from = Usage(), 0, 0

        # ---- The rows: which sequence each holds (-1 for none), and how far it has come
        rows = round_up(min(config.slots or self.total, self.total), shards)
        self.row_ladder = _row_ladder(rows, shards)
        self.lengths = [self.width + room for room in _room_ladder(config)]
        self.sequence, self.steps = np.full(rows, -1), np.zeros(rows, np.int32)
        self.slots: Slots | None = None
        self.column = self.width
        self.block: Prefilled | None = None
        self.block_start, self.block_size = 0, round_up(-(-rows // group_size), shards)

        # ---- The records
        shape = (self.total, config.max_response_length)
        self.tokens = np.full(shape, config.pad_id, np.int32)
        self.logprobs, self.log_kept_mass = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        view = (*shape, config.capture_top_k)
        self.topk = TopKView(np.zeros(view, np.int32), np.zeros(view, np.float32)) if config.capture_top_k else None
        self.entropy = np.zeros(shape, np.float32) if config.capture_entropy else None
        experts = (self.model.num_moe_layers, self.model.moe.experts_per_token)
        routing = config.capture_routing
        self.routing = np.zeros((*shape, *experts), np.int32) if routing else None
        self.prompt_routing = np.zeros((*tokens.shape, *experts), np.int32) if routing else None
        self.response_lengths = np.zeros(self.total, np.int32)

    @property
    def waiting(self) -> int:
        """Sequences that no row holds yet."""
        return self.total - self.waiting_from

    def fill(self) -> bool:
        """Gives free rows to sequences that wait; False when everything is done."""
        active = self.sequence >= 0
        if not active.any() and not self.waiting:
            return False
        self._make_room(active)
        free = np.flatnonzero(self.sequence < 0)
        while len(free) and self.waiting:
            self._prefill(self.waiting_from // self.group_size)
            count = min(
                len(free), self.waiting, (self.block_start + self.block_size) * self.group_size - self.waiting_from
            )
            rows, free = free[:count], free[count:]
            sequences = self.waiting_from + np.arange(count)
            source = np.full(len(self.sequence), -1, np.int32)
            source[rows] = sequences // self.group_size - self.block_start
            # Rows that no sequence starts in take part with any numbers.
            given = np.zeros(len(source), int)
            given[rows] = sequences
            self.slots = programs.insert(
                self.slots, self.block, source, self.key, self.seeds[given], self.limits[given]
            )
            self.sequence[rows], self.steps[rows] = sequences, 0
            self.waiting_from += count
        return True

    def decode(self) -> None:
        """Runs one chunk and takes its records."""
        length = self.slots.cache.length
        self.slots, record = programs.decode(
            self.graphdef,
            self.compiled,
            self.loaded,
            self.slots,
            np.int32(length - self.column),
            np.int32(self._enough_finished()),
            length - self.width,
        )
        record, steps, done = processes.fetch((record, self.slots.steps, self.slots.done))
        advanced = np.where(self.sequence >= 0, steps - self.steps, 0)
        rows, columns = np.nonzero(np.arange(length - self.width) < advanced[:, None])
        at = self.sequence[rows], self.steps[rows] + columns

        def keep(buffer, new):
            buffer[at] = new[rows, columns]

        for name in ("tokens", "logprobs", "log_kept_mass", "topk", "entropy", "routing"):
            jax.tree.map(keep, getattr(self, name), getattr(record, name))
        ended = done & (self.sequence >= 0)
        self.response_lengths[self.sequence[ended]] = steps[ended]
        self.usage.tokens += int(advanced.sum())
        self.usage.row_steps += int(advanced.max()) * len(done)
        self.usage.chunks += 1
        self.usage.programs.add((len(done), length))
        self.finished += int(ended.sum())
        self.column += int(advanced.max())
        self.steps = np.array(steps)
        self.sequence = np.where(ended, -1, self.sequence)

    def rollout(self, policy_step: int) -> Rollout:
        """The record of everything."""
        last = self.tokens[np.arange(self.total), np.maximum(self.response_lengths, 1) - 1]
        routing = None
        if self.routing is not None:
            routing = np.concatenate([np.repeat(self.prompt_routing, self.group_size, axis=0), self.routing], axis=1)
        stopped = np.isin(last, np.array(self.config.stop_ids, np.int32))
        return Rollout(
            prompt_tokens=np.repeat(self.prompts, self.group_size, axis=0),
            prompt_mask=np.repeat(self.prompt_mask, self.group_size, axis=0),
            response_tokens=self.tokens,
            response_mask=np.arange(self.config.max_response_length) < self.response_lengths[:, None],
            finish_reason=np.where(stopped, FinishReason.STOP, FinishReason.LENGTH).astype(np.int32),
            behavior_logprobs=self.logprobs,
            group_ids=np.arange(self.total, dtype=np.int32) // self.group_size,
            log_kept_mass=self.log_kept_mass,
            topk=self.topk,
            entropy=self.entropy,
            routed_experts=routing,
            policy_step=np.int32(policy_step),
        )

    def _make_room(self, active: np.ndarray) -> None:
        """Fewer rows where fewer will do, and free columns for the chunk to come."""
        oldest = self.width + int(self.steps[active].max(initial=0))
        wanted = min(self.config.first_chunk, self._remaining())
        fits = next((length for length in self.lengths if length - oldest >= wanted), self.lengths[-1])
        if self.slots is None:
            self.slots = programs.empty(self.model, len(self.sequence), fits, self.column, self.config.capture_routing)
            return
        rows = self._rows_needed(int(active.sum()) + self.waiting)
        length = self.slots.cache.length
        crowded = length - self.column < wanted and (self.column > oldest or fits > length)
        if rows == len(self.sequence) and not crowded:
            return
        kept = np.argsort(~active, kind="stable")[:rows]
        self.slots = programs.arrange(self.slots, kept.astype(np.int32), np.int32(oldest), fits)
        self.sequence, self.steps, self.column = self.sequence[kept], self.steps[kept], oldest

    def _remaining(self) -> int:
        """Steps that may be left until everything is finished or refilled."""
        if self.waiting:
            return self.config.max_response_length
        active = self.sequence >= 0
        return int((self.limits[self.sequence] - self.steps)[active].max())

    def _rows_needed(self, sequences: int) -> int:
        """Size of the batch from now on; a smaller one is compiled only where many steps are left to gain by it."""
        if self._remaining() < self.config.first_chunk:
            return len(self.sequence)
        return min(rows for rows in self.row_ladder if rows >= min(sequences, self.row_ladder[0]))

    def _enough_finished(self) -> int:
        """Finished rows at which the host has something to do."""
        rows = len(self.sequence)
        if self.waiting:
            return max(1, rows // REFILL_SHARE)
        smaller = [size for size in self.row_ladder if size < rows]
        if smaller and self._remaining() >= self.config.first_chunk:
            return rows - smaller[0]
        return rows

    def _prefill(self, prompt: int) -> None:
        """Makes `prompt` one of the prefilled block."""
        if self.block is not None and prompt < self.block_start + self.block_size:
            return
        part = slice(prompt, prompt + self.block_size)
        tokens, mask = self.prompts[part], self.prompt_mask[part]
        # The last block repeats a prompt, so that its shape is that of the others.
        missing = self.block_size - len(tokens)
        tokens, mask = (np.pad(x, [(0, missing), (0, 0)], mode="edge") for x in (tokens, mask))
        config, self.block_start = self.compiled, prompt
        self.block = programs.prefill(
            self.graphdef, self.model, config.fp8, self.loaded, tokens, mask, config.capture_routing
        )
        if self.prompt_routing is not None:
            self.prompt_routing[part] = processes.fetch(self.block.cache.routed_experts)[: len(tokens) - missing]
        self.usage.prefilled += self.block_size


def pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Left-padded tokens and mask, [prompts, P]; P is 2^n or 3 * 2^n, so that few widths are ever compiled."""
    for i, prompt in enumerate(prompts):
        schema.require(len(prompt) > 0, f"prompts[{i}]", list(prompt), "at least one token long")
    longest = max(map(len, prompts), default=1)
    power = 4
    while 2 * power < longest:
        power *= 2
    width = next(size for size in (power, 3 * power // 2, 2 * power) if size >= longest)
    tokens = np.full((len(prompts), width), pad_id, np.int32)
    mask = np.zeros((len(prompts), width), bool)
    for i, prompt in enumerate(prompts):
        tokens[i, width - len(prompt) :] = prompt
        mask[i, width - len(prompt) :] = True
    return tokens, mask


def _row_ladder(rows: int, shards: int = 1) -> list[int]:
    """Sizes of the batch, falling: each about a quarter of the last, and a multiple of `shards`."""
    ladder = [rows]
    while ladder[-1] // 4 >= max(FEWEST_ROWS, shards):
        ladder.append(round_up(ladder[-1] // 4, shards))
    return ladder


def _room_ladder(config: SamplingConfig) -> list[int]:
    """Response columns of the caches, rising: 1, 3, 7, ... times the first chunk, up to the longest response."""
    ladder, step = [config.first_chunk], config.first_chunk
    while ladder[-1] < config.max_response_length:
        step *= 2
        ladder.append(ladder[-1] + step)
    return [min(room, config.max_response_length) for room in ladder]
