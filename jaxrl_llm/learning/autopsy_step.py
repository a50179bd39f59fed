"""The direction autopsy around every optimizer step of a run (PDM paper, arXiv 2607.10848; `objectives.diagnostics`).

Before the step, each token outside the trust region gets the two criteria's verdicts. After it, the same batch shows
whether its divergence really grew. With a top-K view as wide as the vocabulary the divergences are exact; with a narrower
one they are those of the view with an aggregated tail.
"""

import dataclasses
from typing import Any

import jax

from jaxrl_llm.learning import minibatches
from jaxrl_llm.learning.step import Metrics, TrainStep, loss_inputs
from jaxrl_llm.objectives import diagnostics, sanitize
from jaxrl_llm.objectives import divergence as dv
from jaxrl_llm.objectives.mask import view_of
from jaxrl_llm.types import Batch, TrainState


@dataclasses.dataclass(frozen=True)
class AutopsyStep:
    """`(state, batch) -> (state, metrics)`: the same step, with the autopsy of its batch among its metrics.

    Attributes:
      step: the optimizer step; its result is not changed.
      delta: threshold on KL(mu || pi), nats, beyond which a token is outside.
    """

    step: TrainStep
    delta: float

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        before, rate, ratio = self._look(state.params, batch)
        new_state, metrics = self.step(state, batch)
        after, _, _ = self._look(new_state.params, batch)
        seen = diagnostics.verdicts(before, rate, ratio, batch.advantages, batch.response_mask, self.delta)
        return new_state, metrics | diagnostics.autopsy(seen, before, after)

    def _look(self, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """D, D_dot and r under `params`, float32 [B, T] each, a micro-batch at a time."""
        forward = dataclasses.replace(self.step.forward, entropy=False, topk=True)

        def look(part: Batch):
            tokens = sanitize(loss_inputs(part, forward(params, part), forward.vocab_size))
            view = view_of(tokens, "topk_aggregated")
            return dv.divergence(view), dv.directional_derivative(view), tokens.ratio

        return minibatches.join(jax.lax.map(look, minibatches.split(batch, self.step.micro_batches)))
