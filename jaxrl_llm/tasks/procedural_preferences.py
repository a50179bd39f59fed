"""Preferences made up on the spot, by a rule that is known: what a reward model learns can be held against the truth.

A prompt asks for three letters, as in "bfa?"; a reply is a string of letters. Its utility is the number of asked letters
that it names, less half a point for every letter too many (not asked for, or named before). Of two replies a judge
prefers the first with probability sigmoid((u1 - u2) / noise), so that even the rule itself agrees with only a known
share of the comparisons.

Examples are a pure function of seed and index; a prompt belongs to the held-out split or to training by its checksum.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import schema
from jaxrl_llm.tasks.base import Example, MadeExamples, Task
from jaxrl_llm.tasks.tokenizer import CharTokenizer

LETTERS = "abcdefgh"
ASKED = 3
WASTE = 0.5  # utility that a letter too many costs
HELD_OUT_SHARE = 4  # one prompt in four

Judge = Callable[[Sequence[Example], Sequence[str]], list[float | None]]


@dataclasses.dataclass(frozen=True)
class ProceduralPreferences:
    """Fields of the task.

    Attributes:
      longest: letters of the longest reply among the comparisons and demonstrations.
      noise: temperature of the judge that made the comparisons; 0 for one that is never wrong.
      train_size, eval_size: examples of the two splits.
      seed: of the examples.
    """

    longest: int = 6
    noise: float = 0.25
    train_size: int = 20_000
    eval_size: int = 64
    seed: int = 0

    def __post_init__(self):
        for name, least in (("longest", 1), ("train_size", 1), ("eval_size", 1), ("noise", 0)):
            value = getattr(self, name)
            schema.require(value >= least, f"config.task.procedural_preferences.{name}", value, f"{least} or more")


def utility(prompt: str, reply: str) -> float:
    """The rule: asked letters named, less `WASTE` for every letter too many. At most `ASKED`."""
    named = len(set(prompt.rstrip("?")) & set(reply))
    return named - WASTE * (len(reply) - named)


class Examples(MadeExamples):
    """`size` examples of one split, made when they are asked for. `metadata` holds the chosen and the rejected reply."""

    def __init__(self, config: ProceduralPreferences, held_out: bool, size: int):
        super().__init__(size)
        self.config, self.held_out = config, held_out

    def make(self, index: int) -> Example:
        rng = np.random.default_rng([self.config.seed, int(self.held_out), index])
        prompt = _prompt(rng, self.held_out)
        first, second = (_reply(rng, prompt, self.config.longest) for _ in range(2))
        if rng.random() >= preference(utility(prompt, first) - utility(prompt, second), self.config.noise):
            first, second = second, first
        demonstration = _reply(rng, prompt, self.config.longest)
        split = "eval" if self.held_out else "train"
        metadata = {"chosen": first, "rejected": second}
        return Example(f"{split}-{index}", prompt, "", solution=demonstration, metadata=metadata)


def preference(difference: float, noise: float) -> float:
    """Probability that the judge prefers the first reply, whose utility is higher by `difference`."""
    if noise == 0:
        return 0.5 * (1 + math.copysign(1, difference)) if difference else 0.5
    return 1 / (1 + math.exp(-difference / noise))


@dataclasses.dataclass(frozen=True)
class ProceduralPreferencesTask(Task):
    """See the module docstring.

    Attributes:
      train, evaluation, tokenizer, truncated, name: see `Task`.
      judge: scores replies in the rule's place while training (a reward model), or None.
    """

    train: Examples
    evaluation: Mapping[str, Examples]
    tokenizer: CharTokenizer
    judge: Judge | None = None
    name: str = "procedural_preferences"
    truncated: str = "keep"

    def with_judge(self, judge: Judge) -> "ProceduralPreferencesTask":
        """This task, scored by `judge(examples, replies) -> scores`."""
        return dataclasses.replace(self, judge=judge)

    def best_accuracy(self, examples: Sequence[Example]) -> float:
        """Share of the comparisons with which the rule itself would agree, in expectation: what a reward model can reach."""
        noise = self.train.config.noise
        gaps = [utility(e.prompt, e.metadata["chosen"]) - utility(e.prompt, e.metadata["rejected"]) for e in examples]
        return float(np.mean([preference(abs(gap), noise) for gap in gaps]))

    def score(
        self,
        examples: Sequence[Example],
        completions: Sequence[str],
        lengths: Sequence[int] | None = None,
        truncated: Sequence[bool] | None = None,
    ) -> list[float | None]:
        """The judge's scores, or the rule's where there is none."""
        return self.grade(examples, completions) if self.judge is None else self.judge(examples, completions)

    def grade(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float | None]:
        """By the rule, whoever judges in training: utility as a share of the best, so that the ideal reply has 1."""
        return [utility(e.prompt, c) / ASKED for e, c in zip(examples, completions, strict=True)]


def create(config: Mapping[str, Any]) -> ProceduralPreferencesTask:
    """The task from its fields (see `ProceduralPreferences`)."""
    fields = schema.read(ProceduralPreferences, config, "config.task.procedural_preferences")
    return ProceduralPreferencesTask(
        train=Examples(fields, held_out=False, size=fields.train_size),
        evaluation={"held_out": Examples(fields, held_out=True, size=fields.eval_size)},
        tokenizer=CharTokenizer(LETTERS + "?"),
    )


def is_held_out(prompt: str) -> bool:
    """Which split a prompt belongs to."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_SHARE == 0


def _prompt(rng: np.random.Generator, held_out: bool) -> str:
    while True:
        prompt = "".join(rng.choice(list(LETTERS), ASKED, replace=False)) + "?"
        if is_held_out(prompt) == held_out:
            return prompt


def _reply(rng: np.random.Generator, prompt: str, longest: int) -> str:
    """Letters asked for or any others, one as likely as the other, so that replies of every quality occur."""
    asked, length = list(prompt[:ASKED]), rng.integers(1, longest + 1)
    return "".join(str(rng.choice(asked if rng.random() < 0.5 else list(LETTERS))) for _ in range(length))
