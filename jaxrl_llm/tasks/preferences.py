"""Dialogues to be continued (Anthropic hh-rlhf): no answer is true, so a judge that the user brings scores the replies.

The judge is usually a frozen reward model; `Example.metadata` holds the chosen and the rejected reply, to train one or
to measure its accuracy with.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm import schema
from jaxrl_llm.tasks import dataset
from jaxrl_llm.tasks.base import Example, Task
from jaxrl_llm.tasks.sources import Source

_TRAIN = Source("Anthropic/hh-rlhf", schema="hh_rlhf")
_TEST = Source("Anthropic/hh-rlhf", schema="hh_rlhf", split="test")

Judge = Callable[[Sequence[Example], Sequence[str]], list[float | None]]


@dataclasses.dataclass(frozen=True)
class Preferences:
    """Fields of the task.

    Attributes:
      train, evaluation: where the dialogues are.
      judge: "package.module:function"; called once, without arguments, the function returns what scores the replies. ""
        where config.reward_model names a reward model instead.
      malformed: "refuse" rows that do not fit the schema, or "skip" and count them.
    """

    train: Source = _TRAIN
    evaluation: Source = _TEST
    judge: str = ""
    malformed: Literal["refuse", "skip"] = "refuse"


@dataclasses.dataclass(frozen=True)
class PreferencesTask(Task):
    """See the module docstring.

    Attributes:
      name, train, evaluation, tokenizer: see `Task`.
      accounts: data set -> what became of its rows, in words.
      judge: (examples, replies) -> scores; None until a reward model is attached.
    """

    train: Sequence[Example]
    evaluation: Mapping[str, Sequence[Example]]
    accounts: Mapping[str, str]
    judge: Judge | None
    tokenizer: None = None
    truncated: str = "keep"
    name: str = "preferences"

    def with_judge(self, judge: Judge) -> "PreferencesTask":
        """This task, scored by `judge`."""
        return dataclasses.replace(self, judge=judge)

    def grade(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float | None]:
        """The judge's scores."""
        return self.judge(examples, completions)


def create(config: Mapping[str, Any]) -> PreferencesTask:
    """The task from its fields (see `Preferences`). Reads the data, and logs what became of the rows.

    Raises:
      ValueError: there is no such judge, or the data cannot be read.
    """
    fields = schema.read(Preferences, config, "config.task.preferences")
    judge = _judge(fields.judge) if fields.judge else None
    sets = {}
    for name in ("train", "evaluation"):
        field = f"config.task.preferences.{name}"
        sets[name] = dataset.read(name, getattr(fields, name), fields.malformed, field)
        dataset.report(name, sets[name])
    return PreferencesTask(
        train=sets["train"].examples,
        evaluation={"held_out": sets["evaluation"].examples},
        accounts={name: str(read) for name, read in sets.items()},
        judge=judge,
    )


def _judge(name: str) -> Judge:
    right = 'a "package.module:function" that returns a judge of replies, such as a frozen reward model'
    module, colon, function = name.partition(":")
    schema.require(bool(module and colon and function), "config.task.preferences.judge", name, right)
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"config.task.preferences.judge is {name!r}, which cannot be imported: {error}") from None
    return make()
