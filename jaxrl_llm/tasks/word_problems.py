"""Arithmetic word problems in chat form, made up on the spot, for small models that were trained to talk.

Every problem takes one or two steps of adding, taking away and multiplying with small numbers; the answer to give is short, and
its last number counts. A problem belongs to the held-out split if the checksum of its text says so, and to training
otherwise, so the two never share one.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import schema
from jaxrl_llm.tasks.base import Example, MadeExamples, Task

NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Lea", "Max")
THINGS = ("apples", "pencils", "marbles", "stickers", "books", "coins", "cards", "shells", "stamps", "cookies")
HELD_OUT_SHARE = 10  # one problem in ten
INSTRUCTION = "Show the calculation in one line."
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")

Drawn = tuple[str, int]


def _gain(rng: np.random.Generator, who: str, what: str, limit: int) -> Drawn:
    a, b = (int(x) for x in rng.integers(2, limit + 1, 2))
    return f"{who} has {a} {what} and gets {b} more. How many {what} does {who} have now?", a + b


def _lose(rng: np.random.Generator, who: str, what: str, limit: int) -> Drawn:
    b, a = sorted(int(x) for x in rng.integers(2, limit + 1, 2))
    return f"{who} has {a} {what} and gives away {b}. How many {what} does {who} have left?", a - b


def _boxes(rng: np.random.Generator, who: str, what: str, limit: int) -> Drawn:
    a, b = int(rng.integers(2, 10)), int(rng.integers(2, min(limit, 12) + 1))
    return f"{who} buys {a} boxes with {b} {what} in each. How many {what} does {who} buy?", a * b


def _gain_lose(rng: np.random.Generator, who: str, what: str, limit: int) -> Drawn:
    a, b = (int(x) for x in rng.integers(2, limit + 1, 2))
    c = int(rng.integers(1, a + b))
    text = f"{who} has {a} {what}, finds {b} more and then loses {c}. How many {what} does {who} have now?"
    return text, a + b - c


def _boxes_gain(rng: np.random.Generator, who: str, what: str, limit: int) -> Drawn:
    a, b, c = int(rng.integers(2, 6)), int(rng.integers(2, 11)), int(rng.integers(2, limit + 1))
    text = f"{who} has {c} {what} and buys {a} bags with {b} {what} in each. How many {what} does {who} have in all?"
    return text, a * b + c


# Kind -> (rng, who, what, largest number) -> problem and answer.
KINDS: dict[str, Callable[[np.random.Generator, str, str, int], Drawn]] = {
    "gain": _gain,
    "lose": _lose,
    "boxes": _boxes,
    "gain_lose": _gain_lose,
    "boxes_gain": _boxes_gain,
}


@dataclasses.dataclass(frozen=True)
class WordProblems:
    """Fields of the task.

    Attributes:
      kinds: which problems, in equal shares: gain (a + b), lose (a - b), boxes (a b), gain_lose (a + b - c), boxes_gain
        (a b + c). No answer is negative.
      largest: largest number that is added or taken away.
      train_size, eval_size: examples of the two splits.
      seed: of the examples.
    """

    kinds: tuple[str, ...] = tuple(KINDS)
    largest: int = 20
    train_size: int = 100_000
    eval_size: int = 256
    seed: int = 0

    def __post_init__(self):
        schema.require(len(self.kinds) > 0, "config.task.word_problems.kinds", self.kinds, "at least one kind")
        for kind in self.kinds:
            schema.choose(KINDS, kind, "kind in config.task.word_problems.kinds")
        for name, low in (("largest", 2), ("train_size", 1), ("eval_size", 1)):
            value = getattr(self, name)
            schema.require(value >= low, f"config.task.word_problems.{name}", value, f"{low} or more")


class Examples(MadeExamples):
    """`size` examples of one split, a pure function of seed and index; the held-out ones are all different."""

    def __init__(self, config: WordProblems, held_out: bool, size: int):
        super().__init__(size)
        self.config, self.held_out = config, held_out
        self._distinct = _distinct_held_out(config, size) if held_out else None

    def make(self, index: int) -> Example:
        kind = self.config.kinds[index % len(self.config.kinds)]
        if self._distinct is None:
            text, answer = _draw(np.random.default_rng([self.config.seed, 0, index]), self.config, kind, held_out=False)
        else:
            text, answer = self._distinct[index]
        split = "eval" if self.held_out else "train"
        messages = ({"role": "user", "content": f"{text} {INSTRUCTION}"},)
        return Example(
            f"{split}-{index}", messages, str(answer), solution=f"The answer is {answer}.", metadata={"kind": kind}
        )


def _draw(rng: np.random.Generator, config: WordProblems, kind: str, held_out: bool) -> Drawn:
    while True:
        who, what = NAMES[rng.integers(len(NAMES))], THINGS[rng.integers(len(THINGS))]
        text, answer = KINDS[kind](rng, who, what, config.largest)
        if is_held_out(text) == held_out:
            return text, answer


def _distinct_held_out(config: WordProblems, size: int) -> list[Drawn]:
    rng = np.random.default_rng([config.seed, 1])
    seen: dict[str, int] = {}
    for index in range(size):
        kind, tries = config.kinds[index % len(config.kinds)], 0
        while (drawn := _draw(rng, config, kind, held_out=True))[0] in seen:
            tries += 1
            right = f"smaller: kind {kind!r} has too few different held-out problems"
            schema.require(tries < 1_000, "config.task.word_problems.eval_size", size, right)
        seen[drawn[0]] = drawn[1]
    return list(seen.items())


@dataclasses.dataclass(frozen=True)
class WordProblemsTask(Task):
    """See the module docstring."""

    train: Examples
    evaluation: Mapping[str, Examples]
    tokenizer: None = None
    name: str = "word_problems"
    truncated: str = "keep"

    def grade(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float | None]:
        """1 where the completion's last number is the answer, else 0."""
        return [float(last_number(c) == float(e.answer)) for e, c in zip(examples, completions, strict=True)]


def create(config: Mapping[str, Any]) -> WordProblemsTask:
    """The task from its fields (see `WordProblems`)."""
    fields = schema.read(WordProblems, config, "config.task.word_problems")
    return WordProblemsTask(
        train=Examples(fields, held_out=False, size=fields.train_size),
        evaluation={"held_out": Examples(fields, held_out=True, size=fields.eval_size)},
    )


def is_held_out(text: str) -> bool:
    """Which split a problem belongs to."""
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def last_number(text: str) -> float | None:
    """The last number of a text, "1,000" and "3.50" included, or None."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
