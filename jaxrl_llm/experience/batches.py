"""From rollouts, or from supervised pairs, to `Batch`. Pure functions."""

from collections.abc import Sequence
from typing import Literal, get_args

import chex
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import schema
from jaxrl_llm.types import Batch, Rollout

TruncationRatio = Literal["whole", "sampled"]


def from_rollout(
    rollout: Rollout,
    advantages: chex.Array,
    response_mask: chex.Array | None = None,
    truncation_ratio: TruncationRatio = "whole",
) -> Batch:
    """Lays prompts and responses out side by side.

    Args:
      rollout: `B` sequences.
      advantages: float [B], one per sequence, or [B, T], one per token.
      response_mask: bool [B, T], positions that carry loss, where not all of `rollout.response_mask` does (truncated
        responses left out, for example).
      truncation_ratio: which mu the ratios are taken with, where top-k, top-p or min-p cut the vocabulary. "whole": over
        the whole vocabulary, as the trainer's pi is, so that an unchanged policy has r = 1. "sampled": over the kept
        tokens, so that an unchanged policy has r = the kept mass. The same without truncation. The rollout's top-K view
        must have been captured with the same choice (`Choice.topk_view`).

    Returns:
      A `Batch` of B rows; the advantages are 0 outside the mask.

    Raises:
      ValueError: another `truncation_ratio`.
    """
    schema.require(
        truncation_ratio in get_args(TruncationRatio), "truncation_ratio", truncation_ratio, "whole or sampled"
    )
    behavior = rollout.behavior_logprobs
    if truncation_ratio == "whole":
        behavior = behavior + rollout.log_kept_mass
    mask = rollout.response_mask if response_mask is None else response_mask
    chex.assert_equal_shape([mask, rollout.response_mask])
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    # What was sampled is attended to even where it carries no loss.
    tokens, positions, segment_ids = _layout(
        rollout.prompt_tokens, rollout.prompt_mask, rollout.response_tokens, rollout.response_mask
    )
    return Batch(
        tokens=tokens,
        positions=positions,
        segment_ids=segment_ids,
        response_mask=mask,
        behavior_logprobs=behavior,
        advantages=jnp.where(mask, jnp.broadcast_to(advantages, mask.shape).astype(jnp.float32), 0.0),
        topk=rollout.topk,
        log_kept_mass=rollout.log_kept_mass,
        routed_experts=rollout.routed_experts,
    )


def from_pairs(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    prompt_length: int,
    response_length: int,
    pad_id: int,
) -> Batch:
    """A batch of demonstrations: advantage 1 on every response token, so that `reinforce` is supervised learning.

    Args:
      prompts, responses: token ids of each row.
      prompt_length, response_length: P and T.
      pad_id: filler; it carries no meaning, the masks do.

    Raises:
      ValueError: a pair longer than P or T; it names the row.
    """
    rows = len(prompts)
    prompt_tokens = np.full((rows, prompt_length), pad_id, np.int32)
    response_tokens = np.full((rows, response_length), pad_id, np.int32)
    prompt_mask = np.zeros((rows, prompt_length), bool)
    response_mask = np.zeros((rows, response_length), bool)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not 0 < len(prompt) <= prompt_length or not 0 < len(response) <= response_length:
            raise ValueError(
                f"row {i}: prompt of {len(prompt)} and response of {len(response)} tokens do not fit into"
                f" {prompt_length} + {response_length} (and neither may be empty)"
            )
        prompt_tokens[i, prompt_length - len(prompt) :] = prompt
        prompt_mask[i, prompt_length - len(prompt) :] = True
        response_tokens[i, : len(response)] = response
        response_mask[i, : len(response)] = True
    tokens, positions, segment_ids = _layout(prompt_tokens, prompt_mask, response_tokens, response_mask)
    return Batch(
        tokens=tokens,
        positions=positions,
        segment_ids=segment_ids,
        response_mask=jnp.asarray(response_mask),
        behavior_logprobs=jnp.zeros(response_mask.shape, jnp.float32),
        advantages=jnp.asarray(response_mask, jnp.float32),
    )


def _layout(prompt_tokens, prompt_mask, response_tokens, response_mask):
    chex.assert_equal_shape([prompt_tokens, prompt_mask])
    chex.assert_equal_shape([response_tokens, response_mask])
    mask = jnp.concatenate([prompt_mask, response_mask], axis=1)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0).astype(jnp.int32)
    tokens = jnp.concatenate([prompt_tokens, response_tokens], axis=1).astype(jnp.int32)
    return tokens, positions, mask.astype(jnp.int32)
