"""Experience in the order of its rollouts, sampled ahead of the updates where it may lag behind them.

Staleness: rollout r samples with the parameters that were current n rollouts earlier, which allows it to run beside the
updates of the rollout before.
"""

import collections
import concurrent.futures
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.experience.collector import Collector, Experience


class ExperienceStream:
    """Hands out one rollout after another, each sampled with parameters `staleness` rollouts old.

    With staleness 0 a rollout is collected when it is asked for. Otherwise the next one is collected on a thread while the
    caller updates the parameters: sampling and updates share the device, and decoding and scoring cost no time of it.
    Over several devices there is no thread, because two programs with collectives must start everywhere in one order;
    the numbers are the same either way.
    """

    def __init__(self, collector: Collector, first: int, position: int, behind: Sequence[Any], overlap: bool):
        """
        Args:
          collector: makes a rollout.
          first: rollouts that the run has behind it.
          position: examples that it has drawn.
          behind: parameters before the last `staleness` rollouts' updates, oldest first (`lagging`).
          overlap: collect on a thread.
        """
        self._collector, self._position, self._rollout = collector, position, first
        self._staleness, self._last = collector.run.rollout.staleness, collector.run.training.rollouts
        self._behind = collections.deque(behind, maxlen=self._staleness)
        self._thread = concurrent.futures.ThreadPoolExecutor(1) if overlap and self._staleness else None
        self._next: concurrent.futures.Future | None = None

    def next(self, params: Any) -> Experience:
        """The next rollout; `params` are the current ones, which the caller may donate to the coming updates."""
        self._rollout += 1
        if self._next is None:
            source = self._behind[0] if self._staleness else params
            experience = self._collector(source, self._rollout, self._position)
        else:
            experience = self._next.result()
        self._position = experience.position
        if self._staleness:
            self._behind.append(jax.tree.map(jnp.copy, params))
        if self._thread is not None and self._rollout < self._last:
            self._next = self._thread.submit(self._collector, self._behind[0], self._rollout + 1, self._position)
        return experience

    @property
    def lagging(self) -> tuple[Any, ...]:
        """Parameters that coming rollouts sample with, oldest first: what a checkpoint needs to hold of this."""
        return tuple(self._behind)

    def __enter__(self) -> "ExperienceStream":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
