"""What updates the state of a run, put together from its configuration in one place.

The loop runs what is built here; the planner compiles the same for devices that need not exist.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxrl_llm import objectives
from jaxrl_llm.config import RunConfig
from jaxrl_llm.learning import critic as critics
from jaxrl_llm.learning import optimizer as optimizers
from jaxrl_llm.learning.autopsy_step import AutopsyStep
from jaxrl_llm.learning.step import Forward, TrainStep
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.types import TrainState

Step = TrainStep | AutopsyStep | critics.ActorCriticStep


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The parts of a run's updates.

    Attributes:
      model: the policy's architecture.
      forward: the policy to token statistics.
      loss: the objective.
      optimizer: of the policy.
      critic: where advantages need one, else None.
      step: one optimizer step with everything that belongs to it.
      compared: whether the policy is compared with the one that RL begins with.
    """

    model: ModelConfig
    forward: Forward
    loss: objectives.PolicyLoss
    optimizer: optax.GradientTransformation
    critic: critics.Critic | None
    step: Step
    compared: bool

    def init(self, params: Any, mesh: Mesh) -> TrainState:
        """The state before the first update; `params` are taken over, not copied."""
        return initial_state(params, self.optimizer, mesh, self.compared, self.critic)

    def describe(self, params: Any, mesh: Mesh) -> TrainState:
        """Shapes and places of what `init` gives; allocates nothing."""
        return sharding.describe(jax.eval_shape(functools.partial(self.init, mesh=mesh), params), mesh)


def create(run: RunConfig, model: ModelConfig, graphdef: nnx.GraphDef, mesh: Mesh) -> Trainer:
    """The trainer of `run` for a decoder of architecture `model`, whose graph without parameters is `graphdef`."""
    loss = objectives.build(run.objective)
    optimizer = optimizers.create(run.optimizer, run.optimizer_steps)
    critic = critics.create(run, model, graphdef)
    forward = Forward(
        graphdef,
        model.vocab_size,
        temperature=run.rollout.temperature,
        fp8=run.rollout.fp8.sites if run.rollout.fp8.scope == "end_to_end" else None,
        entropy=True,
        topk="topk_logprobs" in loss.needs,
        layout=sharding.token_layout(mesh),
    )
    step: Step = TrainStep(forward, loss, optimizer, run.training.micro_batches)
    if run.training.autopsy_delta:
        step = AutopsyStep(step, run.training.autopsy_delta)
    if critic is not None:
        step = critic.step(step)
    compared = run.kl.reward > 0 or "reference_logprobs" in loss.needs
    return Trainer(model, forward, loss, optimizer, critic, step, compared)


def initial_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    compared: bool = False,
    critic: critics.Critic | None = None,
) -> TrainState:
    """A state with fresh moments; with a frozen copy of the parameters where they are compared with it."""
    zero = sharding.put(np.int32(0), sharding.replicated(mesh))
    opt_state = optimizers.init_on(mesh, optimizer, params)
    # A copy: the policy's own arrays are donated to its updates.
    frozen = jax.tree.map(jnp.copy, params) if compared else None
    state = TrainState(step=zero, params=params, opt_state=opt_state, skipped=zero + 0, reference_params=frozen)
    return state if critic is None else state.replace(critic=critic.init(params, mesh))


def compile_step(step: Step, state: TrainState):
    """The jitted step for a state (or its shapes) that lies as `state` does."""
    # The state is donated: parameters and moments are updated in place. Its placement is stated, because a state that
    # comes back with another one would be compiled for a second time.
    places = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(places, None))
