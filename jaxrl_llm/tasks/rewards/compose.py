"""From parts to one reward: correctness, format, thoughts, length, each with its weight.

    reward = correct * c + format * f + think * t + overlong * o

with c, f, t in [0, 1] and o in [-1, 0]. A weight of 0 leaves a part out, and it is not computed. Where the grader
failed the reward is None, whatever the other parts say.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl_llm import schema
from jaxrl_llm.tasks.base import Example
from jaxrl_llm.tasks.rewards import length, text
from jaxrl_llm.tasks.rewards.pool import GraderPool, PoolConfig


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weight of each part; see the module docstring."""

    correct: float = 1.0
    format: float = 0.0
    think: float = 0.0
    overlong: float = 0.0


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """How completions are judged.

    Attributes:
      grader: what correct means: "math" (equivalence), "exact" (the same text) or "gsm8k" (the number after "####").
      weights: of the parts.
      wrong: value of c for a wrong answer; DAPO uses -1.
      overlong_max_length: tokens at which the overlong punishment is full; the response limit, usually.
      overlong_buffer: tokens over which it grows.
      truncated: what becomes of a response cut at its limit: "zero" counts it as wrong and unformatted, "keep" judges
        it like any other, "mask" judges it and leaves it out of the loss.
      pool: processes of the math grader.
    """

    grader: Literal["math", "exact", "gsm8k"] = "math"
    weights: Weights = dataclasses.field(default_factory=Weights)
    wrong: float = 0.0
    overlong_max_length: int = 0
    overlong_buffer: int = 0
    truncated: Literal["zero", "keep", "mask"] = "keep"
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)

    def __post_init__(self):
        if self.weights.overlong:
            schema.require(
                self.overlong_max_length > 0, "rewards.overlong_max_length", self.overlong_max_length, "positive"
            )
            schema.require(
                0 < self.overlong_buffer <= self.overlong_max_length,
                "rewards.overlong_buffer",
                self.overlong_buffer,
                f"between 1 and overlong_max_length = {self.overlong_max_length}",
            )
        schema.require(self.wrong <= 0, "rewards.wrong", self.wrong, "0 or negative")


class Rewards:
    """Judges completions by a `RewardConfig`. Its pool starts with the first answer to the math grader."""

    def __init__(self, config: RewardConfig):
        self.config = config
        self.pool = GraderPool("math", config.pool) if config.grader == "math" else None

    def close(self) -> None:
        """Ends the pool's processes."""
        if self.pool is not None:
            self.pool.close()

    def correct(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float | None]:
        """1 where the answer is right, 0 where it is not, None where the grader failed."""
        pairs = list(zip(completions, examples, strict=True))
        if self.pool is not None:
            return self.pool.grade([{"completion": c, "truth": e.answer} for c, e in pairs])
        grade = text.gsm8k if self.config.grader == "gsm8k" else text.exact_match
        return [grade(completion, example.answer) for completion, example in pairs]

    def __call__(
        self,
        examples: Sequence[Example],
        completions: Sequence[str],
        lengths: Sequence[int] | None = None,
        truncated: Sequence[bool] | None = None,
    ) -> list[float | None]:
        """The reward of each completion.

        Args:
          examples, completions: B of each.
          lengths: tokens of each response; needed where the overlong weight is not 0.
          truncated: which responses were cut at their limit; needed where `truncated` is "zero".

        Raises:
          ValueError: lengths or truncated are needed and missing.
        """
        grades: list[float | None] = [0.0] * len(completions)
        if self.config.weights.correct:
            # What counts as wrong in any case need not be graded.
            cut = _cut(self.config, truncated, len(completions))
            rows = np.flatnonzero(~cut).tolist()
            found = self.correct([examples[i] for i in rows], [completions[i] for i in rows])
            for i, grade in zip(rows, found, strict=True):
                grades[i] = grade
        return combine(self.config, grades, completions, lengths, truncated)


def combine(
    config: RewardConfig,
    grades: Sequence[float | None],
    completions: Sequence[str],
    lengths: Sequence[int] | None = None,
    truncated: Sequence[bool] | None = None,
) -> list[float | None]:
    """The weighted sum of the module docstring, given correctness in [0, 1]; see `Rewards.__call__`."""
    weights, cut = config.weights, _cut(config, truncated, len(completions))
    failed = [grade is None for grade in grades]
    correct = np.array([np.nan if grade is None else grade for grade in grades], np.float64)
    correct = np.where(cut, 0.0, correct)
    total = weights.correct * np.where(correct > 0, correct, config.wrong)
    if weights.format:
        total += weights.format * np.where(cut, 0.0, list(map(text.answer_format, completions)))
    if weights.think:
        total += weights.think * np.where(cut, 0.0, list(map(text.think_format, completions)))
    if weights.overlong:
        tokens = np.asarray(_needed(lengths, "lengths", "rewards.weights.overlong"))
        total += weights.overlong * length.soft_overlong(tokens, config.overlong_max_length, config.overlong_buffer)
    return [None if bad else float(value) for bad, value in zip(failed, total, strict=True)]


def _cut(config: RewardConfig, truncated: Sequence[bool] | None, count: int) -> np.ndarray:
    """bool [B], the responses that count as wrong because they were cut at their limit."""
    if config.truncated != "zero":
        return np.zeros(count, bool)
    return np.asarray(_needed(truncated, "truncated", "rewards.truncated = 'zero'"), bool)


def _needed(values: Sequence[Any] | None, name: str, why: str) -> Sequence[Any]:
    if values is None:
        raise ValueError(f"{why} needs the {name} of the responses, which score() was not given")
    return values


def read(config: Mapping[str, Any], path: str) -> RewardConfig:
    """A `RewardConfig` from its fields; errors name them under `path`."""
    return schema.read(RewardConfig, config, path)
