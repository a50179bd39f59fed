"""What one rollout does to the state: scores, advantages, mini-batches, optimizer steps, and the numbers that tell of them."""

import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import objectives, processes, tasks
from jaxrl_llm.config import RunConfig
from jaxrl_llm.experience.collector import Experience, to_batch
from jaxrl_llm.learning import advantages, minibatches, packing, reference
from jaxrl_llm.learning import trainer as trainers
from jaxrl_llm.learning.mismatch import Mismatch
from jaxrl_llm.learning.step import score
from jaxrl_llm.learning.trainer import Trainer
from jaxrl_llm.models.flops import attention_share
from jaxrl_llm.parallel import sharding
from jaxrl_llm.records.metrics import reduce_updates
from jaxrl_llm.types import Batch, Packing, TrainState


class Learner:
    """`learner(state, experience, rollout, kl_scale) -> (state, metrics)`, with the programs that it runs.

    The state is given away: its arrays are updated in place.
    """

    def __init__(
        self, run: RunConfig, task: tasks.Task, trainer: Trainer, state: TrainState, mesh: Mesh, key: jax.Array
    ):
        """
        Args:
          run: of which every rollout is learned alike.
          task: says which tokens carry loss.
          trainer: its parts.
          state: where the run's state lies.
          mesh: of its devices.
          key: of the order in which rows are learned; rollout r uses `fold_in(key, r)`.
        """
        self._run, self._task, self._trainer, self._mesh, self._key = run, task, trainer, mesh, key
        self._attention = attention_share(trainer.model)
        self._step = trainers.compile_step(trainer.step, state)
        self._score = jax.jit(functools.partial(score, trainer.forward, micro_batches=run.training.parts))
        self._take = jax.jit(minibatches.take, out_shardings=sharding.batch_sharding(mesh))
        self._measure = jax.jit(objectives.margin_diagnostics, static_argnames="alpha")

    def __call__(
        self, state: TrainState, experience: Experience, rollout: int, kl_scale: float
    ) -> tuple[TrainState, dict[str, float]]:
        """Learns from one rollout.

        Args:
          state: before its updates.
          experience: what was sampled and how it was rewarded.
          rollout: its number, from 1.
          kl_scale: factor on the coefficients of the reference KL.
        """
        start, run, trainer = time.monotonic(), self._run, self._trainer
        batch = to_batch(self._task, experience, run.rollout.truncation_ratio)
        lengths = packing.lengths_of(batch)
        batch, assessed = self._judged(state, experience, batch, lengths, kl_scale)
        updates, slots = [], 0
        for minibatch in self._minibatches(batch, lengths, jax.random.fold_in(self._key, rollout)):
            state, update = self._step(state, minibatch)
            updates.append(update)
            slots += packing.slots(minibatch)
        jax.block_until_ready(state)  # steps are dispatched, not awaited
        seconds = time.monotonic() - start

        row = assessed | reduce_updates(updates) | _mismatch(batch, updates[0])
        row["data/padding_share"] = 1 - run.training.epochs * lengths.tokens.sum() / slots
        if run.diagnostics.margin:
            now = self._score(state.params, batch)
            where = batch.behavior_logprobs, batch.advantages, batch.response_mask
            row |= reduce_updates([self._measure(now, *where, alpha=run.diagnostics.margin)])
        if trainer.compared:
            kl = reference.kl_per_token(batch.behavior_logprobs, batch.reference_logprobs, batch.response_mask)
            row |= {"kl/reference": kl, "kl/scale": kl_scale}
        row["optimizer/steps"] = rollout * len(updates)
        row["optimizer/skipped_total"] = int(processes.fetch(state.skipped))
        row["time/update_s"] = seconds
        return state, row

    def _judged(
        self, state: TrainState, experience: Experience, batch: Batch, lengths: packing.Lengths, kl_scale: float
    ) -> tuple[Batch, dict[str, float]]:
        """The batch, divided over the mesh, with the log-probs that its loss compares and with advantages; metrics of these."""
        run, trainer, mesh = self._run, self._trainer, self._mesh
        if run.training.packing:
            _, shared = self._pack(lengths, run.training.parts, reorder=False)
            batch = batch.replace(packing=shared)
        batch = sharding.spread(batch, mesh)
        if "old_logprobs" in trainer.loss.needs or run.kl.reward:
            batch = batch.replace(old_logprobs=self._score(state.params, batch))
        if trainer.compared:
            batch = batch.replace(reference_logprobs=self._score(state.reference_params, batch))
        batch, assessed = advantages.assess(run, state, experience, batch, trainer.critic, kl_scale)
        return sharding.spread(batch, mesh), assessed

    def _minibatches(self, batch: Batch, lengths: packing.Lengths, key: jax.Array) -> Iterator[Batch]:
        """The rows in a new random order every epoch, cut into mini-batches, packed where the configuration says so."""
        training = self._run.training
        batch = batch.replace(packing=None)  # that was for scoring, and would have `take` compiled anew
        for epoch in range(training.epochs):
            order = np.asarray(jax.random.permutation(jax.random.fold_in(key, epoch), len(lengths.tokens)))
            for rows in order.reshape(training.updates_per_rollout, -1):
                if not training.packing:
                    yield self._take(batch, rows)
                    continue
                places, shared = self._pack(lengths.take(rows), training.micro_batches)
                yield self._take(batch, rows[places], shared)

    def _pack(self, lengths: packing.Lengths, parts: int, *, reorder: bool = True) -> tuple[np.ndarray, Packing | None]:
        rows, columns = sharding.data_shards(self._mesh), sharding.column_shards(self._mesh)
        return packing.plan(lengths, rows, parts, self._attention, reorder=reorder, columns=columns)


def _mismatch(batch: Batch, update: dict[str, Any]) -> dict[str, float]:
    """Sampler against trainer before a rollout's updates; staleness counts as mismatch here.

    From the scores of the whole rollout, where the objective wants them, else from the first mini-batch.
    """
    if batch.old_logprobs is not None:
        old, behavior, mask = processes.fetch((batch.old_logprobs, batch.behavior_logprobs, batch.response_mask))
        log_ratio = np.clip(np.float64(old[mask]) - behavior[mask], -20, 20)  # bounded as the objectives bound it
        log_ratio = log_ratio[np.isfinite(log_ratio)]
        if not len(log_ratio):
            return {}
        found = Mismatch.of(log_ratio)
        values = {"mean_abs_log_ratio": found.mean, "max_abs_log_ratio": found.max, "k3": found.k3}
        return {f"mismatch/{name}": value for name, value in values.items()}
    names = {"ratio/abs_log": "mean_abs_log_ratio", "ratio/max_abs_log": "max_abs_log_ratio", "ratio/k3": "k3"}
    values = reduce_updates([{name: update[name] for name in names}])
    return {f"mismatch/{short}": values[name] for name, short in names.items() if name in values}
