"""Arithmetic made up on the spot: no download, a truth for every prompt, difficulty at will.

Examples are a pure function of seed and index. A prompt belongs to the held-out split if its checksum says so, and to
training otherwise, so the two can never share a prompt whatever their seeds and sizes.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from jaxrl_llm import schema
from jaxrl_llm.tasks.base import Example
from jaxrl_llm.tasks.tokenizer import CharTokenizer

ALPHABET = "0123456789+-*="
HELD_OUT_SHARE = 10  # one prompt in ten


def _digits(rng: np.random.Generator, count: int) -> int:
    return int(rng.integers(10 ** (count - 1) if count > 1 else 0, 10**count))


def _add(rng: np.random.Generator, digits: int) -> str:
    return f"{_digits(rng, digits)}+{_digits(rng, digits)}"


def _sub(rng: np.random.Generator, digits: int) -> str:
    a, b = sorted((_digits(rng, digits), _digits(rng, digits)))
    return f"{b}-{a}"


def _sum3(rng: np.random.Generator, digits: int) -> str:
    return "+".join(str(_digits(rng, digits)) for _ in range(3))


def _mul(rng: np.random.Generator, digits: int) -> str:
    return f"{_digits(rng, digits)}*{_digits(rng, 1)}"


# Kind -> (rng, digits) -> expression. The kind's name in a configuration carries the digits: "add2", "mul1".
KINDS = {"add": _add, "sub": _sub, "sum": _sum3, "mul": _mul}


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Fields of the task.

    Attributes:
      kinds: which problems, equally likely: add, sub (no negative result), sum (three terms), mul (by one digit), each
        with a number of digits, 1 to 4, as in "add2".
      train_size, eval_size: examples of the two splits.
      seed: of the examples.
    """

    kinds: tuple[str, ...] = ("add2", "sub2", "sum1", "mul1")
    train_size: int = 100_000
    eval_size: int = 512
    seed: int = 0

    def __post_init__(self):
        for kind in self.kinds:
            schema.require(
                kind[:-1] in KINDS and kind[-1:] in "1234",
                "config.task.arithmetic.kinds",
                kind,
                f"one of {', '.join(KINDS)} followed by a number of digits, 1 to 4",
            )
        schema.require(len(self.kinds) > 0, "config.task.arithmetic.kinds", self.kinds, "at least one kind")
        schema.require(self.train_size > 0, "config.task.arithmetic.train_size", self.train_size, "positive")
        schema.require(self.eval_size > 0, "config.task.arithmetic.eval_size", self.eval_size, "positive")


class Examples(Sequence):
    """`size` examples of one split, made when they are asked for."""

    def __init__(self, config: Arithmetic, held_out: bool, size: int):
        self.config, self.held_out, self.size = config, held_out, size

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        index = int(index) % self.size
        rng = np.random.default_rng([self.config.seed, int(self.held_out), index])
        kind = self.config.kinds[index % len(self.config.kinds)]
        while True:
            expression = KINDS[kind[:-1]](rng, int(kind[-1]))
            if is_held_out(expression) == self.held_out:
                break
        answer = str(evaluate(expression))
        split = "eval" if self.held_out else "train"
        return Example(f"{split}-{index}", expression + "=", answer, solution=answer, metadata={"kind": kind})


@dataclasses.dataclass(frozen=True)
class ArithmeticTask:
    """See the module docstring."""

    train: Examples
    evaluation: Mapping[str, Examples]
    tokenizer: CharTokenizer
    name: str = "arithmetic"

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float | None]:
        """1 where the completion is the answer, digit by digit, else 0."""
        return [float(c.strip() == e.answer) for e, c in zip(examples, completions, strict=True)]


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
    total = 0
    for term in expression.replace("-", "+-").split("+"):
        factors = [int(f) for f in term.split("*")]
        total += int(np.prod(factors))
    return total
