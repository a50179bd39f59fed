"""Dialogues to be continued (Anthropic hh-rlhf): no answer is true, so a judge that the caller brings scores the replies.

The judge is usually a frozen reward model; `Example.metadata` holds the chosen and the rejected reply, to train one or
to measure its accuracy with.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm import schema
from jaxrl_llm.tasks import dataset
from jaxrl_llm.tasks.base import Example
from jaxrl_llm.tasks.sources import Source

log = logging.getLogger(__name__)

_TRAIN = Source("Anthropic/hh-rlhf", schema="hh_rlhf")
_TEST = Source("Anthropic/hh-rlhf", schema="hh_rlhf", split="test")

Judge = Callable[[Sequence[Example], Sequence[str]], list[float | None]]


@dataclasses.dataclass(frozen=True)
class Preferences:
    """Fields of the task.

    Attributes:
      train, evaluation: where the dialogues are.
      malformed: "refuse" rows that do not fit the schema, or "skip" and count them.
    """

    train: Source = _TRAIN
    evaluation: Source = _TEST
    malformed: Literal["refuse", "skip"] = "refuse"


@dataclasses.dataclass(frozen=True)
class PreferencesTask:
    """See the module docstring.

    Attributes:
      name, train, evaluation, tokenizer: see `Task`.
      accounts: data set -> what became of its rows, in words.
      judge: scores replies, or None before `with_judge`.
    """

    train: Sequence[Example]
    evaluation: Mapping[str, Sequence[Example]]
    accounts: Mapping[str, str]
    judge: Judge | None = None
    tokenizer: None = None
    truncated: str = "keep"
    name: str = "preferences"

    def with_judge(self, judge: Judge) -> "PreferencesTask":
        """This task, scored by `judge(examples, replies) -> scores`."""
        return dataclasses.replace(self, judge=judge)

    def grade(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float | None]:
        """The judge's scores.

        Raises:
          ValueError: there is no judge.
        """
        if self.judge is None:
            raise ValueError(
                "task 'preferences' has no truth to score against: give it a reward model with with_judge()"
            )
        return self.judge(examples, completions)

    def score(
        self,
        examples: Sequence[Example],
        completions: Sequence[str],
        lengths: Sequence[int] | None = None,
        truncated: Sequence[bool] | None = None,
    ) -> list[float | None]:
        """The same as `grade`."""
        return self.grade(examples, completions)


def create(config: Mapping[str, Any]) -> PreferencesTask:
    """The task from its fields (see `Preferences`). Reads the data, and logs what became of the rows."""
    fields = schema.read(Preferences, config, "config.task.preferences")
    sets = {}
    for name in ("train", "evaluation"):
        field = f"config.task.preferences.{name}"
        sets[name] = dataset.read(name, getattr(fields, name), fields.malformed, field)
        log.info("%s: %s", name, sets[name])
    return PreferencesTask(
        train=sets["train"].examples,
        evaluation={"held_out": sets["evaluation"].examples},
        accounts={name: str(read) for name, read in sets.items()},
    )
