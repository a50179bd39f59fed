"""Arithmetic made up on the spot: no download, a truth for every prompt, difficulty at will.

A worked solution is ">" and the running totals, as in "3+4-2=" -> ">7,5"; the answer is the last of its numbers. A
guess gives one number at once.

Examples are a pure function of seed and index. A prompt belongs to the held-out split if its checksum says so, and to
training otherwise, so the two can never share a prompt whatever their seeds and sizes.
"""

import dataclasses
import itertools
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import schema
from jaxrl_llm.tasks.base import Example, MadeExamples, Task
from jaxrl_llm.tasks.tokenizer import CharTokenizer

ALPHABET = "0123456789+-*=>,"
HELD_OUT_SHARE = 10  # one prompt in ten


def _digits(rng: np.random.Generator, count: int) -> int:
    return int(rng.integers(10 ** (count - 1) if count > 1 else 0, 10**count))


def _add(rng: np.random.Generator, digits: int) -> str:
    return f"{_digits(rng, digits)}+{_digits(rng, digits)}"


def _sub(rng: np.random.Generator, digits: int) -> str:
    a, b = sorted((_digits(rng, digits), _digits(rng, digits)))
    return f"{b}-{a}"


def _sum(rng: np.random.Generator, terms: int) -> str:
    return "+".join(str(_digits(rng, 1)) for _ in range(terms))


def _mix(rng: np.random.Generator, terms: int) -> str:
    while True:
        signs = rng.choice(["+", "-"], terms - 1)
        expression = str(_digits(rng, 1)) + "".join(f"{sign}{_digits(rng, 1)}" for sign in signs)
        if evaluate(expression) >= 0:
            return expression


def _mul(rng: np.random.Generator, digits: int) -> str:
    return f"{_digits(rng, digits)}*{_digits(rng, 1)}"


# Kind -> (rng, size) -> expression. In a configuration the size follows the kind: "add2" adds numbers of two digits,
# "sum4" four one-digit numbers.
KINDS = {"add": _add, "sub": _sub, "mul": _mul, "sum": _sum, "mix": _mix}


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Fields of the task.

    Attributes:
      kinds: which problems, in equal shares: add, sub, mul (of numbers with that many digits; mul by one digit), sum and
        mix (that many one-digit numbers, added, or added and subtracted), each with a size, as in "add2". No result is
        negative.
      guessed_demonstrations: share of training demonstrations that guess (off by up to 3, right one time in seven)
        instead of working the answer out. A policy that imitates such a teacher is careful or hasty as often as it.
      train_size, eval_size: examples of the two splits.
      seed: of the examples.
    """

    kinds: tuple[str, ...] = ("add2", "sub2", "sum4", "mix3")
    guessed_demonstrations: float = 0.0
    train_size: int = 100_000
    eval_size: int = 512
    seed: int = 0

    def __post_init__(self):
        for kind in self.kinds:
            schema.require(
                kind[:-1] in KINDS and kind[-1:] in "12345",
                "config.task.arithmetic.kinds",
                kind,
                f"one of {', '.join(KINDS)} followed by a size, 1 to 5",
            )
        schema.require(len(self.kinds) > 0, "config.task.arithmetic.kinds", self.kinds, "at least one kind")
        schema.require(
            0 <= self.guessed_demonstrations < 1,
            "config.task.arithmetic.guessed_demonstrations",
            self.guessed_demonstrations,
            "in [0, 1)",
        )
        schema.require(self.train_size > 0, "config.task.arithmetic.train_size", self.train_size, "positive")
        schema.require(self.eval_size > 0, "config.task.arithmetic.eval_size", self.eval_size, "positive")


class Examples(MadeExamples):
    """`size` examples of one split, made when they are asked for; the held-out ones are all different."""

    def __init__(self, config: Arithmetic, held_out: bool, size: int):
        super().__init__(size)
        self.config, self.held_out = config, held_out
        self._distinct = _distinct_held_out(config, size) if held_out else None

    def make(self, index: int) -> Example:
        rng = np.random.default_rng([self.config.seed, int(self.held_out), index])
        kind = self.config.kinds[index % len(self.config.kinds)]
        expression = self._distinct[index] if self.held_out else _draw(rng, kind, held_out=False)
        truth = evaluate(expression)
        solution = ">" + ",".join(map(str, running_totals(expression)))
        if rng.random() < self.config.guessed_demonstrations:
            solution = str(abs(truth + int(rng.integers(-3, 4))))
        split = "eval" if self.held_out else "train"
        return Example(f"{split}-{index}", expression + "=", str(truth), solution=solution, metadata={"kind": kind})


def _draw(rng: np.random.Generator, kind: str, held_out: bool) -> str:
    while True:
        expression = KINDS[kind[:-1]](rng, int(kind[-1]))
        if is_held_out(expression) == held_out:
            return expression


def _distinct_held_out(config: Arithmetic, size: int) -> list[str]:
    rng = np.random.default_rng([config.seed, 1])
    seen: dict[str, None] = {}
    for index in range(size):
        kind, tries = config.kinds[index % len(config.kinds)], 0
        while (expression := _draw(rng, kind, held_out=True)) in seen:
            tries += 1
            schema.require(
                tries < 10_000,
                "config.task.arithmetic.eval_size",
                size,
                f"smaller: kind {kind!r} has too few different held-out prompts",
            )
        seen[expression] = None
    return list(seen)


@dataclasses.dataclass(frozen=True)
class ArithmeticTask(Task):
    """See the module docstring."""

    train: Examples
    evaluation: Mapping[str, Examples]
    tokenizer: CharTokenizer
    truncated: str = "keep"
    name: str = "arithmetic"

    def grade(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float | None]:
        """1 where the completion's last number is the answer, digit by digit, else 0."""
        return [float(re.split("[>,]", c)[-1] == e.answer) for e, c in zip(examples, completions, strict=True)]


def create(config: Mapping[str, Any]) -> ArithmeticTask:
    """The task from its fields (see `Arithmetic`)."""
    fields = schema.read(Arithmetic, config, "config.task.arithmetic")
    return ArithmeticTask(
        train=Examples(fields, held_out=False, size=fields.train_size),
        evaluation={"held_out": Examples(fields, held_out=True, size=fields.eval_size)},
        tokenizer=CharTokenizer(ALPHABET),
    )


def is_held_out(expression: str) -> bool:
    """Which split an expression belongs to."""
    return zlib.crc32(expression.encode()) % HELD_OUT_SHARE == 0


def evaluate(expression: str) -> int:
    """Value of sums, differences and products of integers, products first."""
    return running_totals(expression)[-1]


def running_totals(expression: str) -> list[int]:
    """The totals after the second, third, ... term of an expression; its value alone where it has one term."""
    terms = [math.prod(map(int, term.split("*"))) for term in expression.replace("-", "+-").split("+")]
    return list(itertools.accumulate(terms))[1:] or terms
