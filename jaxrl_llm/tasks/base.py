"""The records and the protocol that every task follows."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, overload


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt with what is needed to judge answers to it.

    Attributes:
      id: unique within its task.
      prompt: text, or chat messages as a tuple of {"role", "content"} mappings.
      answer: the truth, as the task's grader reads it.
      solution: a demonstration for supervised learning, or "" where there is none.
      metadata: anything else, such as the difficulty.
    """

    id: str
    prompt: str | tuple[Mapping[str, str], ...]
    answer: str
    solution: str = ""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class MadeExamples(Sequence[Example]):
    """`size` examples that `make(index)` makes when they are asked for, so that nothing is held in memory."""

    def __init__(self, size: int):
        self.size = size

    def make(self, index: int) -> Example:
        """Example `index` of 0 .. size - 1; the same one every time."""
        raise NotImplementedError

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
        return self.make(int(index) % self.size)


class Task(Protocol):
    """A source of examples and a judge of completions. A task inherits from it, and may leave `score` as it is here.

    Attributes:
      name: as in the configuration.
      train: training examples, indexable, deterministic.
      evaluation: name of a held-out set -> its examples.
      tokenizer: a tokenizer of the task's own, or None where the model's is used.
      truncated: what becomes of responses cut at their limit: "keep", "zero" or "mask"; see `rewards.length.loss_rows`.
    """

    name: str
    train: Sequence[Example]
    evaluation: Mapping[str, Sequence[Example]]
    tokenizer: Any | None
    truncated: str

    def grade(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float | None]:
        """How right each completion is, in [0, 1], for evaluation; None where the grader itself failed."""
        ...

    def score(
        self,
        examples: Sequence[Example],
        completions: Sequence[str],
        lengths: Sequence[int] | None = None,
        truncated: Sequence[bool] | None = None,
    ) -> list[float | None]:
        """The reward to train on, which is `grade` unless the task says more; None where the grader itself failed.

        Args:
          examples, completions: B of each.
          lengths: tokens of each response, its end token included, for rewards that depend on them.
          truncated: which responses were cut at their limit, likewise.
        """
        return self.grade(examples, completions)
