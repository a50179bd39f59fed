"""From prompts to scored rollouts: sample, decode, reward. The one place where text and tokens meet."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm import processes
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.tasks import Example, Task
from jaxrl_llm.tasks.rewards.length import loss_rows
from jaxrl_llm.types import FinishReason, Rollout


@dataclasses.dataclass(frozen=True)
class ScoredRollout:
    """A rollout and what its completions earned. Row order is the rollout's (group-major).

    Attributes:
      rollout: the sampler's record.
      examples: the example that each row answers.
      completions: decoded response of each row, without the end token.
      rewards: float64 [B], NaN where the grader failed.
    """

    rollout: Rollout
    examples: Sequence[Example]
    completions: Sequence[str]
    rewards: np.ndarray


def sample_and_score(
    sampler: Sampler,
    params: Any,
    task: Task,
    tokenizer: Any,
    examples: Sequence[Example],
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    group_size: int,
    policy_step: int = 0,
    *,
    seeds: Sequence[int] | None = None,
    evaluation: bool = False,
) -> ScoredRollout:
    """Samples `group_size` completions of every prompt and scores them: by `task.grade` for an evaluation.

    `seeds` are the sampler's.
    """
    rollout = sampler(params, prompts, key, group_size=group_size, seeds=seeds, policy_step=policy_step)
    repeated = [example for example in examples for _ in range(group_size)]
    completions = decode(rollout, tokenizer)
    return ScoredRollout(rollout, repeated, completions, _rewards(task, rollout, repeated, completions, evaluation))


def _rewards(
    task: Task, rollout: Rollout, examples: Sequence[Example], completions: Sequence[str], evaluation: bool
) -> np.ndarray:
    """float64 [B]. Each process scores its part of the rows, and all get the same numbers, whatever a clock decided.

    A judge (`with_judge`) may be a program on all devices, which all processes must run on all rows.
    """
    judged = getattr(task, "judge", None) is not None
    part = slice(None) if judged else processes.part(len(completions))
    if evaluation:
        scores = task.grade(examples[part], completions[part])
    else:
        lengths, truncated = rollout.response_mask.sum(axis=1), rollout.finish_reason == FinishReason.LENGTH
        scores = task.score(examples[part], completions[part], lengths[part].tolist(), truncated[part].tolist())
    rewards = np.array([np.nan if score is None else score for score in scores], np.float64)
    return processes.gather(rewards)[0] if judged else processes.gather_parts(rewards, len(completions))


def decode(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Text of each response; the end token, part of the response for the loss, is not part of the text."""
    lengths = rollout.response_mask.sum(axis=1) - (rollout.finish_reason == FinishReason.STOP)
    rows = zip(rollout.response_tokens, lengths, strict=True)
    return [tokenizer.decode(row[:length].tolist()) for row, length in rows]


def loss_mask(task: Task, rollout: Rollout) -> jax.Array:
    """bool [B, T], the sampled tokens that carry loss; a task may leave truncated responses out."""
    return rollout.response_mask & loss_rows(task.truncated, rollout.finish_reason == FinishReason.LENGTH)[:, None]


def concatenate(parts: Sequence[ScoredRollout]) -> ScoredRollout:
    """Several rollouts of one sampler as one, on the host; shorter prompts are padded to the longest's width."""
    if len(parts) == 1:
        return parts[0]
    rollouts = [part.rollout for part in parts]
    width = max(rollout.prompt_tokens.shape[1] for rollout in rollouts)
    offsets = np.cumsum([0] + [int(rollout.group_ids[-1]) + 1 for rollout in rollouts])
    padded = [_pad_prompts(r, width, offset) for r, offset in zip(rollouts, offsets.tolist(), strict=False)]
    return ScoredRollout(
        rollout=jax.tree.map(lambda *x: np.concatenate(x) if np.ndim(x[0]) else x[0], *padded),
        examples=[example for part in parts for example in part.examples],
        completions=[text for part in parts for text in part.completions],
        rewards=np.concatenate([part.rewards for part in parts]),
    )


def flat_groups(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """bool [B / group_size], True where a group's valid rewards (float [B], NaN for none) are all equal: no gradient."""
    groups = rewards.reshape(-1, group_size)
    scored = ~np.isnan(groups)
    low = np.min(groups, axis=1, initial=np.inf, where=scored)
    high = np.max(groups, axis=1, initial=-np.inf, where=scored)
    return high <= low


def rollout_metrics(scored: ScoredRollout) -> dict[str, float]:
    """What a rollout tells before any update: reward, lengths, truncation, groups without a signal, graders that failed."""
    rollout, rewards = scored.rollout, scored.rewards
    lengths = rollout.response_mask.sum(axis=1)
    scored = ~np.isnan(rewards)
    flat = flat_groups(rewards, len(rewards) // len(np.unique(rollout.group_ids)))
    return {
        "reward/mean": float(rewards[scored].mean()) if scored.any() else float("nan"),
        "reward/failed_grades": float((~scored).sum()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float((rollout.finish_reason == FinishReason.LENGTH).mean()),
        "advantage/zero_groups": float(np.mean(flat)),
    }


def _pad_prompts(rollout: Rollout, width: int, first_group: int) -> Rollout:
    """Left-pads what is laid out along the prompt, and counts groups from `first_group`."""

    def pad(x):
        missing = width - rollout.prompt_tokens.shape[1]
        return np.pad(x, [(0, 0), (missing, 0)] + [(0, 0)] * (x.ndim - 2))

    return rollout.replace(
        prompt_tokens=pad(rollout.prompt_tokens),
        prompt_mask=pad(rollout.prompt_mask),
        routed_experts=None if rollout.routed_experts is None else pad(rollout.routed_experts),
        group_ids=rollout.group_ids + np.int32(first_group),
    )
