"""How a rollout's data is gathered: sampled and scored, flat groups replaced, and ahead of the updates where it may lag.

Dynamic sampling (DAPO, arXiv 2503.14476): a group of equal rewards has no gradient, so further prompts are sampled in its
place, up to a bound. Staleness: rollout r samples with the parameters that were current n rollouts earlier, which allows
it to run beside the updates of the rollout before. What is sampled is a function of seed, rollout and position in the
data alone, so neither changes what a resumed run repeats.
"""

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.placement import Loaded
from jaxrl_llm.rollout.sampler import Sampler, SamplingConfig
from jaxrl_llm.training import batch as batches
from jaxrl_llm.training.collect import (
    Collected,
    Prompts,
    collect,
    concatenate,
    flat_groups,
    loss_mask,
    next_prompts,
    rollout_metrics,
)
from jaxrl_llm.training.config import RunConfig
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.types import Batch, FinishReason


@dataclasses.dataclass(frozen=True)
class Gathered:
    """One rollout's data.

    Attributes:
      collected: everything that was sampled, in whole rounds of `rollout.prompts` groups.
      rows: int [B], the rows of `collected` that make the batch, whole groups of them.
      trained: bool [B], False on rows that only fill the batch up to its size.
      position: examples that the run has drawn from its data, these included.
      dropped: examples among them whose prompt is too long.
      reshard_s: seconds until the parameters lay as the sampler wants them, or None where they did already.
    """

    collected: Collected
    rows: np.ndarray
    trained: np.ndarray
    position: int
    dropped: int
    reshard_s: float | None = None

    @property
    def rewards(self) -> np.ndarray:
        """float64 [B], of the batch's rows; NaN where the grader failed."""
        return self.collected.rewards[self.rows]

    @property
    def truncated(self) -> np.ndarray:
        """bool [B], rows of the batch that were cut at the limit."""
        return np.asarray(self.collected.rollout.finish_reason)[self.rows] == FinishReason.LENGTH

    def metrics(self) -> dict[str, float]:
        """Of everything sampled, and of what became of it."""
        resharding = {} if self.reshard_s is None else {"time/reshard_s": self.reshard_s}
        return (
            resharding
            | rollout_metrics(self.collected)
            | {
                "rollout/rounds": len(self.collected.rewards) / len(self.rows),
                "rollout/filler": float(1 - self.trained.mean()),
                "data/prompts_too_long": self.dropped,
            }
        )


@dataclasses.dataclass(frozen=True)
class Gather:
    """`gather(params, rollout, position) -> Gathered`.

    Attributes:
      run, task, policy: of the run.
      sampler: of the behaviour policy.
      key: of the run's sampling; rollout r uses `fold_in(key, r)`.
    """

    run: RunConfig
    task: tasks.Task
    policy: Policy
    sampler: Sampler
    key: jax.Array

    def __call__(self, params: Any, rollout: int, position: int) -> Gathered:
        r, parts, flat, dropped = self.run.rollout, [], np.empty(0, bool), 0
        start = time.monotonic()
        loaded = self.sampler.load(params)
        if loaded.gathered:
            jax.block_until_ready(loaded)
        reshard_s = time.monotonic() - start if loaded.gathered else None
        for turn in range(1 + r.refill_rounds):
            prompts, position = next_prompts(
                self.task.train, self.policy.tokenizer, r.max_prompt_length, self.run.seed, position, r.prompts
            )
            parts.append(self._sample(loaded, prompts, rollout, turn))
            dropped += prompts.dropped
            if r.refill_rounds == 0:
                flat = np.zeros(r.prompts, bool)  # every group is trained on
                break
            flat = np.append(flat, flat_groups(parts[-1].rewards, r.group_size))
            if np.sum(~flat) >= r.prompts:
                break
        rows, trained = choose_groups(flat, r.prompts, r.group_size)
        return Gathered(concatenate(parts), rows, trained, position, dropped, reshard_s)

    def _sample(self, params: Loaded, prompts: Prompts, rollout: int, turn: int) -> Collected:
        training, rows = self.run.training, self.run.sequences
        behind = max(0, rollout - 1 - self.run.rollout.staleness)
        return collect(
            self.sampler,
            params,
            self.task,
            self.policy.tokenizer,
            prompts.examples,
            prompts.tokens,
            jax.random.fold_in(self.key, rollout),
            self.run.rollout.group_size,
            behind * training.updates_per_rollout * training.epochs,
            seeds=range(turn * rows, (turn + 1) * rows),
        )


class Rollouts:
    """Hands out one rollout after another, each sampled with parameters `staleness` rollouts old.

    With staleness 0 a rollout is gathered when it is asked for. Otherwise the next one is gathered on a thread while the
    caller updates the parameters: sampling and updates share the device, and decoding and scoring cost no time of it.
    Over several devices there is no thread, because two programs with collectives must start everywhere in one order;
    the numbers are the same either way.
    """

    def __init__(self, gather: Gather, first: int, position: int, behind: Sequence[Any], overlap: bool):
        """
        Args:
          gather: makes a rollout.
          first: rollouts that the run has behind it.
          position: examples that it has drawn.
          behind: parameters before the last `staleness` rollouts' updates, oldest first (`lagging`).
          overlap: gather on a thread.
        """
        self._gather, self._position, self._rollout = gather, position, first
        self._staleness, self._last = gather.run.rollout.staleness, gather.run.training.rollouts
        self._behind = collections.deque(behind, maxlen=self._staleness)
        self._thread = concurrent.futures.ThreadPoolExecutor(1) if overlap and self._staleness else None
        self._next: concurrent.futures.Future | None = None

    def next(self, params: Any) -> Gathered:
        """The next rollout; `params` are the current ones, which the caller may donate to the coming updates."""
        self._rollout += 1
        if self._next is None:
            source = self._behind[0] if self._staleness else params
            gathered = self._gather(source, self._rollout, self._position)
        else:
            gathered = self._next.result()
        self._position = gathered.position
        if self._staleness:
            self._behind.append(jax.tree.map(jnp.copy, params))
        if self._thread is not None and self._rollout < self._last:
            self._next = self._thread.submit(self._gather, self._behind[0], self._rollout + 1, self._position)
        return gathered

    @property
    def lagging(self) -> tuple[Any, ...]:
        """Parameters that coming rollouts sample with, oldest first: what a checkpoint needs to hold of this."""
        return tuple(self._behind)

    def __enter__(self) -> "Rollouts":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


def create(run: RunConfig, task: tasks.Task, policy: Policy, key: jax.Array) -> Gather:
    """The gatherer of a run, `key` being that of its sampling."""
    r = run.rollout
    config = SamplingConfig(
        max_response_length=r.max_response_length,
        stop_ids=policy.stop_ids,
        pad_id=policy.pad_id,
        choice=Choice(r.temperature, r.top_k, r.top_p, r.min_p, r.fp8.logits),
        capture_top_k=r.capture_top_k,
        capture_routing=r.routing_replay,
        fp8=r.fp8.sites,
        slots=r.slots,
        gather_params=r.gather_params,
    )
    return Gather(run, task, policy, Sampler(policy.graphdef, policy.config, config), key)


def choose_groups(flat: np.ndarray, wanted: int, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The groups that make a batch: the first `wanted` with a signal, filled up with flat ones that carry no loss.

    Args:
      flat: bool [groups], True where all rewards are equal; at least `wanted` groups.
      wanted: groups in the batch.
      group_size: rows per group, adjacent.

    Returns:
      Rows, int [wanted * group_size], rising; and whether each is trained on, bool of the same shape.
    """
    groups = np.sort(np.argsort(flat, kind="stable")[:wanted])
    rows = (groups[:, None] * group_size + np.arange(group_size)).reshape(-1)
    return rows, np.repeat(~flat[groups], group_size)


def to_batch(task: tasks.Task, gathered: Gathered) -> Batch:
    """The chosen rows, without advantages yet; those that only fill the batch, or that the task leaves out, are masked."""
    rows, rollout = gathered.rows, gathered.collected.rollout
    if len(rows) < len(gathered.collected.rewards):
        rollout = jax.tree.map(lambda x: x[rows] if np.ndim(x) else x, rollout)
    mask = loss_mask(task, rollout) & gathered.trained[:, None]
    return batches.from_rollout(rollout, jnp.zeros(len(rows)), mask)
