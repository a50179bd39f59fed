"""The critic: values of every position, the targets that GAE makes of them, and its step beside the policy's.

Runs without a critic hold None where its state would be and compile the policy's step alone.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxrl_llm import config as configs
from jaxrl_llm import objectives, processes
from jaxrl_llm.learning import minibatches
from jaxrl_llm.learning import optimizer as optimizers
from jaxrl_llm.learning.forward_rows import rows_of
from jaxrl_llm.learning.step import Metrics, TrainStep
from jaxrl_llm.models.abstract import abstract
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import ScalarHead, ScalarModel
from jaxrl_llm.parallel import sharding
from jaxrl_llm.types import Batch, CriticState, TrainState


@dataclasses.dataclass(frozen=True)
class Values:
    """The critic's forward pass. Hashable: every field is static under jit.

    Attributes:
      graphdef: a `ScalarModel`, or a `ScalarHead` that reads the policy's hidden states.
      policy: the policy without its parameters where the head reads its hidden states, else None.
    """

    graphdef: nnx.GraphDef
    policy: nnx.GraphDef | None = None

    def __call__(self, params: Any, policy_params: Any, batch: Batch) -> jax.Array:
        """float32 [B, T + 1]: the value before each response token, and after the last; differentiable by `params`."""
        model, rows = nnx.merge(self.graphdef, params), rows_of(batch)
        where = rows.tokens, rows.positions, rows.segment_ids
        if self.policy is None:
            values = model(*where)
        else:
            values = model(jax.lax.stop_gradient(nnx.merge(self.policy, policy_params).hidden(*where)))
        return rows.around(values)


@dataclasses.dataclass(frozen=True)
class CriticStep:
    """`(critic, policy_params, batch) -> (critic, metrics)`: one step on the clipped value loss, a mean over tokens.

    A step whose gradient is not finite changes nothing.

    Attributes:
      values: the forward pass.
      optimizer: optax transformation.
      clip: see `objectives.value_loss`.
      micro_batches: parts computed one after another.
    """

    values: Values
    optimizer: optax.GradientTransformation
    clip: float
    micro_batches: int = 1

    def __call__(self, critic: CriticState, policy_params: Any, batch: Batch) -> tuple[CriticState, Metrics]:
        # Counted once for the whole batch, so that its micro-batches' gradients add up to that of one mean.
        tokens = jnp.sum(batch.response_mask)

        def loss(params, part):
            values = self.values(params, policy_params, part)[:, :-1]
            losses = objectives.value_loss(values, part.old_values, part.returns, part.response_mask, clip=self.clip)
            return objectives.divide(jnp.sum(losses), tokens)

        def one(part):
            value, gradient = jax.value_and_grad(loss)(critic.params, part)
            return value, jax.tree.map(lambda g: g.astype(jnp.float32), gradient)

        parts = minibatches.split(batch, self.micro_batches)
        if len(parts.tokens) == 1:
            value, gradient = one(jax.tree.map(lambda x: x[0], parts))
        else:
            zeros = (jnp.float32(0), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), critic.params))
            add = functools.partial(jax.tree.map, jnp.add)
            value, gradient = jax.lax.scan(lambda total, part: (add(total, one(part)), None), zeros, parts)[0]
        norm = optax.global_norm(gradient)
        updates, opt_state = self.optimizer.update(gradient, critic.opt_state, critic.params)
        new = CriticState(optax.apply_updates(critic.params, updates), opt_state)
        new = jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(norm), a, b), new, critic)
        metrics = {"critic/loss": value, "critic/grad_norm": norm}
        return new, {name: objectives.Metric(v, jnp.float32(1)) for name, v in metrics.items()}


@dataclasses.dataclass(frozen=True)
class ActorCriticStep:
    """`TrainStep` and `CriticStep` on the same mini-batch, as one program."""

    policy: TrainStep
    critic: CriticStep

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        critic, values = self.critic(state.critic, state.params, batch)
        state, metrics = self.policy(state, batch)
        return state.replace(critic=critic), metrics | values


@dataclasses.dataclass(frozen=True)
class Critic:
    """What the loop needs of a critic: its first state, its step, and its judgement of a rollout, in `parts` parts."""

    config: configs.Critic
    model: ModelConfig
    values: Values
    optimizer: optax.GradientTransformation
    micro_batches: int
    parts: int

    def init(self, policy_params: Any, mesh: jax.sharding.Mesh) -> CriticState:
        """The state before RL: values of 0, and with a trunk of its own a copy of the policy's."""
        params = _first(self.config.trunk, self.model, policy_params)
        params = sharding.put(params, sharding.shardings(params, mesh))
        return CriticState(params, optimizers.init_on(mesh, self.optimizer, params))

    def step(self, policy: TrainStep) -> ActorCriticStep:
        """The policy's step with the critic's."""
        return ActorCriticStep(policy, CriticStep(self.values, self.optimizer, self.config.clip, self.micro_batches))

    def assess(
        self, state: TrainState, batch: Batch, rewards: jax.Array, truncated: jax.Array
    ) -> tuple[Batch, dict[str, float]]:
        """`batch` with advantages, old values and returns; and how good the values were. Arguments as `targets`."""
        values = _values(self.values, self.parts, state.critic.params, state.params, batch)
        batch, metrics = targets(
            batch, values, rewards, truncated, self.config.gamma, self.config.lam, self.config.whiten
        )
        return batch, {name: float(value) for name, value in processes.fetch(metrics).items()}


def create(run: configs.RunConfig, model: ModelConfig, policy: nnx.GraphDef) -> Critic | None:
    """The critic of a run whose advantages need one, or None; `policy` is the decoder without its parameters."""
    if run.estimator != "gae":
        return None
    config = dataclasses.replace(run.optimizer, learning_rate=run.critic.learning_rate)
    if run.critic.trunk == "own":
        graph = abstract(ScalarModel, model)[0]
        values = Values(graph)
    else:
        graph = abstract(ScalarHead, model)[0]
        values = Values(graph, policy)
    optimizer = optimizers.create(config, run.optimizer_steps)
    return Critic(run.critic, model, values, optimizer, run.training.micro_batches, run.training.parts)


@functools.partial(jax.jit, static_argnames=("gamma", "lam", "white"))
def targets(
    batch: Batch,
    values: chex.Array,
    rewards: chex.Array,
    truncated: chex.Array,
    gamma: float,
    lam: float,
    white: bool,
) -> tuple[Batch, dict[str, jax.Array]]:
    """Advantages and returns of a rollout by GAE.

    Args:
      batch: a rollout.
      values: float [B, T + 1], see `Values`.
      rewards: float [B, T], per token; a row with NaN (its grader failed) teaches neither policy nor critic.
      truncated: bool [B], responses cut at the limit, whose last state is worth the critic's value; others' is worth 0.
      gamma, lam, white: see `config.Critic`.

    Returns:
      The batch with `advantages`, `old_values` and `returns`, and metrics of the critic.
    """
    rows, width = batch.response_mask.shape
    chex.assert_shape(values, (rows, width + 1))
    chex.assert_shape(rewards, (rows, width))
    known = ~jnp.any(jnp.isnan(rewards) & batch.response_mask, axis=1)
    mask = batch.response_mask & known[:, None]
    lengths = jnp.sum(batch.response_mask, axis=1)
    after = jnp.take_along_axis(values, lengths[:, None], axis=1)[:, 0]
    bootstrap = jnp.where(truncated, after, 0.0)
    old = values[:, :-1]
    advantages, returns = objectives.gae(rewards, old, mask, bootstrap, gamma=gamma, lam=lam)
    if white:
        advantages = objectives.whiten(advantages, mask)
    metrics = {
        "critic/explained_variance": objectives.explained_variance(old, returns, mask),
        "critic/value_mean": objectives.divide(jnp.sum(jnp.where(mask, old, 0.0)), jnp.sum(mask)),
        "critic/return_mean": objectives.divide(jnp.sum(returns), jnp.sum(mask)),
    }
    # Where the reward is unknown the target is the value itself: no error, no gradient.
    returns = jnp.where(known[:, None], returns, old)
    return batch.replace(advantages=advantages, old_values=old, returns=returns), metrics


@functools.partial(jax.jit, static_argnums=(0, 1))
def _values(values: Values, parts: int, params: Any, policy_params: Any, batch: Batch) -> jax.Array:
    """Values of a rollout, float32 [B, T + 1], one of `parts` parts after another, as `step.score` does it."""
    return minibatches.join(
        jax.lax.map(lambda part: values(params, policy_params, part), minibatches.split(batch, parts))
    )


def _first(trunk: str, model: ModelConfig, policy_params: Any) -> Any:
    if trunk == "policy":
        return nnx.split(ScalarHead(model), nnx.Param)[1]
    params = abstract(ScalarModel, model)[1]
    pure = nnx.to_pure_dict(policy_params)
    pure.pop("head", None)
    # Copies, because the policy's own buffers are given away at every step.
    kernel = np.zeros(params["score"]["kernel"].shape, model.param_dtype)
    nnx.replace_by_pure_dict(params, {"trunk": jax.tree.map(jnp.copy, pure), "score": {"kernel": kernel}})
    return params
