"""One rollout's experience: prompts sampled and scored, and flat groups replaced by others.

Dynamic sampling (DAPO, arXiv 2503.14476): a group of equal rewards has no gradient, so further prompts are sampled in its
place, up to a bound. What is sampled is a function of seed, rollout and position in the data alone, so that a resumed run
repeats it.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.config import RunConfig
from jaxrl_llm.experience import batches
from jaxrl_llm.experience.policy import Policy
from jaxrl_llm.experience.prompts import Prompts, next_prompts
from jaxrl_llm.experience.scored_rollout import (
    ScoredRollout,
    concatenate,
    flat_groups,
    loss_mask,
    rollout_metrics,
    sample_and_score,
)
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.placement import Loaded
from jaxrl_llm.rollout.sampler import Sampler, SamplingConfig
from jaxrl_llm.types import Batch, FinishReason


@dataclasses.dataclass(frozen=True)
class Experience:
    """One rollout's data.

    Attributes:
      scored: everything that was sampled, in whole rounds of `rollout.prompts` groups.
      rows: int [B], the rows of `scored` that make the batch, whole groups of them.
      trained: bool [B], False on rows that only fill the batch up to its size.
      position: examples that the run has drawn from its data, these included.
      dropped: examples among them whose prompt is too long.
      reshard_s: seconds until the parameters lay as the sampler wants them, or None where they did already.
    """

    scored: ScoredRollout
    rows: np.ndarray
    trained: np.ndarray
    position: int
    dropped: int
    reshard_s: float | None = None

    @property
    def rewards(self) -> np.ndarray:
        """float64 [B], of the batch's rows; NaN where the grader failed."""
        return self.scored.rewards[self.rows]

    @property
    def truncated(self) -> np.ndarray:
        """bool [B], rows of the batch that were cut at the limit."""
        return np.asarray(self.scored.rollout.finish_reason)[self.rows] == FinishReason.LENGTH

    def metrics(self) -> dict[str, float]:
        """Of everything sampled, and of what became of it."""
        resharding = {} if self.reshard_s is None else {"time/reshard_s": self.reshard_s}
        return (
            resharding
            | rollout_metrics(self.scored)
            | {
                "rollout/rounds": len(self.scored.rewards) / len(self.rows),
                "rollout/filler": float(1 - self.trained.mean()),
                "data/prompts_too_long": self.dropped,
            }
        )


@dataclasses.dataclass(frozen=True)
class Collector:
    """`collector(params, rollout, position) -> Experience`.

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

    def __call__(self, params: Any, rollout: int, position: int) -> Experience:
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
        return Experience(concatenate(parts), rows, trained, position, dropped, reshard_s)

    def _sample(self, params: Loaded, prompts: Prompts, rollout: int, turn: int) -> ScoredRollout:
        training, rows = self.run.training, self.run.sequences
        behind = max(0, rollout - 1 - self.run.rollout.staleness)
        return sample_and_score(
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


def create(run: RunConfig, task: tasks.Task, policy: Policy, key: jax.Array) -> Collector:
    """The collector of a run, `key` being that of its sampling."""
    r = run.rollout
    config = SamplingConfig(
        max_response_length=r.max_response_length,
        stop_ids=policy.stop_ids,
        pad_id=policy.pad_id,
        choice=Choice(r.temperature, r.top_k, r.top_p, r.min_p, r.fp8.logits, r.truncation_ratio),
        capture_top_k=r.capture_top_k,
        capture_routing=r.routing_replay,
        fp8=r.fp8.sites,
        slots=r.slots,
        gather_params=r.gather_params,
    )
    return Collector(run, task, policy, Sampler(policy.graphdef, policy.config, config), key)


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


def to_batch(task: tasks.Task, experience: Experience, truncation_ratio: batches.TruncationRatio = "whole") -> Batch:
    """The chosen rows, without advantages yet; those that only fill the batch, or that the task leaves out, are masked.

    `truncation_ratio`: see `batches.from_rollout`.
    """
    rows, rollout = experience.rows, experience.scored.rollout
    if len(rows) < len(experience.scored.rewards):
        rollout = jax.tree.map(lambda x: x[rows] if np.ndim(x) else x, rollout)
    mask = loss_mask(task, rollout) & experience.trained[:, None]
    return batches.from_rollout(rollout, jnp.zeros(len(rows)), mask, truncation_ratio)
