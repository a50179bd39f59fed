"""From prompts to scored rollouts: sample, decode, reward. The one place where text and tokens meet."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.tasks import Example, Task
from jaxrl_llm.tasks.prompts import encode
from jaxrl_llm.tasks.rewards.length import loss_rows
from jaxrl_llm.training.data import example_indices
from jaxrl_llm.types import FinishReason, Rollout


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Examples with their token ids, those over the length limit left out.

    Attributes:
      examples: what was asked.
      tokens: token ids of each prompt.
      dropped: examples left out because their prompt is too long.
    """

    examples: Sequence[Example]
    tokens: Sequence[list[int]]
    dropped: int

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Collected:
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


def tokenize(examples: Sequence[Example], tokenizer: Any, limit: int) -> Prompts:
    """Token ids of every prompt (see `prompts.encode`); those longer than `limit` tokens are left out and counted."""
    kept, tokens = [], []
    for example in examples:
        ids = encode(tokenizer, example)
        if len(ids) <= limit:
            kept.append(example)
            tokens.append(ids)
    return Prompts(kept, tokens, dropped=len(examples) - len(kept))


def next_prompts(
    train: Sequence[Example], tokenizer: Any, limit: int, seed: int, position: int, count: int
) -> tuple[Prompts, int]:
    """The next `count` training prompts of at most `limit` tokens from the shuffled stream.

    Args:
      train: all training examples.
      tokenizer: see `prompts.encode`.
      limit: tokens of the longest prompt; longer ones are passed over and counted.
      seed, position: of the stream; see `data.example_indices`.
      count: prompts wanted.

    Returns:
      The prompts, and the position after the last example that was looked at.

    Raises:
      ValueError: not one prompt of a whole epoch fits.
    """
    examples: list[Example] = []
    tokens: list[list[int]] = []
    start = position
    while len(tokens) < count:
        indices = example_indices(seed, position, count - len(tokens), len(train))
        fitting = tokenize([train[i] for i in indices], tokenizer, limit)
        examples += fitting.examples
        tokens += fitting.tokens
        position += len(indices)
        if not tokens and position - start >= len(train):
            raise ValueError(f"config.rollout.max_prompt_length is {limit}; not one training prompt is that short")
    return Prompts(examples, tokens, dropped=position - start - count), position


def collect(
    sampler: Sampler,
    params: Any,
    task: Task,
    tokenizer: Any,
    examples: Sequence[Example],
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    group_size: int,
    policy_step: int = 0,
    evaluation: bool = False,
) -> Collected:
    """Samples `group_size` completions of every prompt and scores them: by `task.grade` for an evaluation."""
    rollout = sampler(params, prompts, key, group_size=group_size, policy_step=policy_step)
    repeated = [example for example in examples for _ in range(group_size)]
    completions = decode(rollout, tokenizer)
    if evaluation:
        scores = task.grade(repeated, completions)
    else:
        mask, reasons = jax.device_get((rollout.response_mask, rollout.finish_reason))
        lengths, truncated = mask.sum(axis=1).tolist(), (reasons == FinishReason.LENGTH).tolist()
        scores = task.score(repeated, completions, lengths, truncated)
    rewards = np.array([np.nan if score is None else score for score in scores], np.float64)
    return Collected(rollout, repeated, completions, rewards)


def decode(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Text of each response; the end token, part of the response for the loss, is not part of the text."""
    tokens, mask, reasons = jax.device_get((rollout.response_tokens, rollout.response_mask, rollout.finish_reason))
    lengths = mask.sum(axis=1) - (reasons == FinishReason.STOP)
    return [tokenizer.decode(row[:length].tolist()) for row, length in zip(tokens, lengths, strict=True)]


def loss_mask(task: Task, rollout: Rollout) -> jax.Array:
    """bool [B, T], the sampled tokens that carry loss; a task may leave truncated responses out."""
    return rollout.response_mask & loss_rows(task.truncated, rollout.finish_reason == FinishReason.LENGTH)[:, None]


def rollout_metrics(collected: Collected) -> dict[str, float]:
    """What a rollout tells before any update: reward, lengths, truncation, groups without a signal, graders that failed."""
    rollout, rewards = collected.rollout, collected.rewards
    mask, reasons, groups = jax.device_get((rollout.response_mask, rollout.finish_reason, rollout.group_ids))
    lengths = mask.sum(axis=1)
    scored = ~np.isnan(rewards)
    # A group whose valid rewards are all equal gives no gradient.
    flat = [
        np.ptp(rewards[members]) == 0 if (members := (groups == g) & scored).any() else True for g in np.unique(groups)
    ]
    return {
        "reward/mean": float(rewards[scored].mean()) if scored.any() else float("nan"),
        "reward/failed_grades": float((~scored).sum()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float((reasons == FinishReason.LENGTH).mean()),
        "advantage/zero_groups": float(np.mean(flat)),
    }
