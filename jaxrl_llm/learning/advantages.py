"""From a scored rollout to its advantages: group statistics, or GAE with the critic, after the reference's KL."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.config import RunConfig
from jaxrl_llm.experience.collector import Experience
from jaxrl_llm.learning import reference
from jaxrl_llm.learning.critic import Critic
from jaxrl_llm.types import Batch, TrainState


def assess(
    run: RunConfig,
    state: TrainState,
    experience: Experience,
    batch: Batch,
    critic: Critic | None,
    kl_scale: float = 1.0,
) -> tuple[Batch, dict[str, float]]:
    """`batch` with its advantages (and the critic's targets), and metrics of them.

    Args:
      run: says which estimator.
      state: parameters that sampled.
      experience: the rollout and its rewards.
      batch: its rows; with old and reference log-probs where the reward holds a KL.
      critic: where the estimator is GAE.
      kl_scale: factor on the KL's coefficients in reward and loss, see `reference.steer`.
    """
    rewards = experience.rewards.astype(np.float32)
    if run.kl.target:
        batch = batch.replace(kl_scale=jnp.full(len(rewards), kl_scale, jnp.float32))
    by_token = objectives.terminal_rewards(rewards, batch.response_mask)
    if run.kl.reward > 0:
        cost = reference.token_costs(
            batch.response_mask, batch.old_logprobs, batch.reference_logprobs, run.kl.reward * kl_scale
        )
        # Of the sequence's reward itself, which counts in its group also where the response carries no loss.
        by_token, rewards = by_token - cost, rewards - jnp.sum(cost, axis=1)
    if critic is not None:
        return critic.assess(state, batch, by_token, experience.truncated)
    groups = np.arange(len(rewards)) // run.rollout.group_size
    advantages = _of_sequences(run, rewards, groups)[:, None]
    return batch.replace(advantages=jnp.where(batch.response_mask, advantages, 0.0).astype(jnp.float32)), {}


def _of_sequences(run: RunConfig, rewards: jax.Array, groups: Any) -> jax.Array:
    if run.estimator == "rloo":
        return objectives.rloo_advantages(rewards, groups, run.rollout.prompts)
    if run.estimator == "reinforce_plus_plus":
        return objectives.reinforce_plus_plus_advantages(rewards)
    normalize = objectives.find(run.objective["name"]).normalize_std and run.advantage.normalize_std
    return objectives.group_advantages(rewards, groups, run.rollout.prompts, normalize_std=normalize)
