"""From a scored rollout to its advantages: group statistics, or GAE with the critic, after the reference's KL."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import objectives
from jaxrl_llm.training import reference
from jaxrl_llm.training.collect import Collected
from jaxrl_llm.training.config import RunConfig
from jaxrl_llm.training.critic import Critic
from jaxrl_llm.types import Batch, FinishReason, TrainState


def assess(
    run: RunConfig, state: TrainState, collected: Collected, batch: Batch, critic: Critic | None, kl_scale: float = 1.0
) -> tuple[Batch, dict[str, float]]:
    """`batch` with its advantages (and the critic's targets), and metrics of them.

    Args:
      run: says which estimator.
      state: parameters that sampled.
      collected: rollout and rewards.
      batch: the rollout's rows; with old and reference log-probs where the reward holds a KL.
      critic: where the estimator is GAE.
      kl_scale: factor on `run.kl.reward`, see `reference.steer`.
    """
    rewards, rollout = jnp.asarray(collected.rewards, jnp.float32), collected.rollout
    if run.kl.reward == 0:
        by_token = objectives.terminal_rewards(rewards, batch.response_mask)
    else:
        by_token = reference.token_rewards(
            rewards, batch.response_mask, batch.old_logprobs, batch.reference_logprobs, run.kl.reward * kl_scale
        )
        rewards = jnp.sum(by_token, axis=1)
    if critic is not None:
        return critic.assess(state, batch, by_token, rollout.finish_reason == FinishReason.LENGTH)
    advantages = _of_sequences(run, rewards, rollout.group_ids)[:, None]
    return batch.replace(advantages=jnp.where(batch.response_mask, advantages, 0.0).astype(jnp.float32)), {}


def _of_sequences(run: RunConfig, rewards: jax.Array, groups: Any) -> jax.Array:
    if run.estimator == "rloo":
        return objectives.rloo_advantages(rewards, groups, run.rollout.prompts)
    if run.estimator == "reinforce_plus_plus":
        return objectives.reinforce_plus_plus_advantages(rewards)
    normalize = objectives.OBJECTIVES[run.objective["name"]].normalize_std and run.advantage.normalize_std
    return objectives.group_advantages(rewards, groups, run.rollout.prompts, normalize_std=normalize)
