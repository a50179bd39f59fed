"""Mathematics with checked answers: training on DAPO-Math-17k or GSM8K, evaluation on AIME, MATH-500, GSM8K.

Every data set may come from the hub or from a local copy (`sources`); every answer is judged by `rewards`.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm import schema
from jaxrl_llm.tasks import dataset
from jaxrl_llm.tasks.base import Example, Task
from jaxrl_llm.tasks.rewards.compose import RewardConfig, Rewards
from jaxrl_llm.tasks.sources import Source

log = logging.getLogger(__name__)

_DAPO = Source("BytedTsinghua-SIA/DAPO-Math-17k", schema="dapo")
_AIME24 = Source("HuggingFaceH4/aime_2024", schema="problem")
_AIME25 = Source("math-ai/aime25", schema="problem", split="test")
_MATH500 = Source("HuggingFaceH4/MATH-500", schema="problem", split="test")
_GSM8K_TRAIN = Source("openai/gsm8k", schema="gsm8k", subset="main")
_GSM8K_TEST = Source("openai/gsm8k", schema="gsm8k", subset="main", split="test")
_OWN = Source("", schema="problem")


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where each data set is; set `path` to a local copy to run without network.

    Attributes:
      own_train, own_test: data of your own, in any of the schemas.
    """

    dapo_math_17k: Source = _DAPO
    aime24: Source = _AIME24
    aime25: Source = _AIME25
    math500: Source = _MATH500
    gsm8k_train: Source = _GSM8K_TRAIN
    gsm8k_test: Source = _GSM8K_TEST
    own_train: Source = _OWN
    own_test: Source = _OWN


DATA_SETS = {field.name: field.default for field in dataclasses.fields(Sources)}


@dataclasses.dataclass(frozen=True)
class Mathematics:
    """Fields of the task.

    Attributes:
      train: data set to train on.
      evaluation: data sets to evaluate on.
      sources: where they are.
      malformed: "refuse" rows that do not fit their schema, or "skip" and count them.
      instruction: appended to problems whose prompt does not say how to give the answer.
      system: a system message in front, or "".
      chat: whether prompts are conversations, for chat models, or plain text.
      rewards: how completions are judged.
    """

    train: str = "dapo_math_17k"
    evaluation: tuple[str, ...] = ("aime24", "aime25")
    sources: Sources = dataclasses.field(default_factory=Sources)
    malformed: Literal["refuse", "skip"] = "refuse"
    instruction: str = r"Think it through step by step, then give the final answer in \boxed{}."
    system: str = ""
    chat: bool = True
    rewards: RewardConfig = dataclasses.field(default_factory=RewardConfig)

    def __post_init__(self):
        schema.choose(DATA_SETS, self.train, "data set config.task.mathematics.train")
        schema.require(
            len(self.evaluation) > 0, "config.task.mathematics.evaluation", self.evaluation, "at least one set"
        )
        for name in self.evaluation:
            schema.choose(DATA_SETS, name, "data set config.task.mathematics.evaluation")


@dataclasses.dataclass(frozen=True)
class MathematicsTask(Task):
    """See the module docstring.

    Attributes:
      name, train, evaluation, tokenizer: see `Task`.
      rewards: judges completions; its `close` ends the grader's processes before the task's end.
      accounts: data set -> what became of its rows, in words.
    """

    train: Sequence[Example]
    evaluation: Mapping[str, Sequence[Example]]
    rewards: Rewards
    accounts: Mapping[str, str]
    tokenizer: None = None
    name: str = "mathematics"

    @property
    def truncated(self) -> str:
        """The policy for truncated responses; see `RewardConfig`."""
        return self.rewards.config.truncated

    def grade(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float | None]:
        """1 for a right answer, 0 for a wrong one, None where the grader failed."""
        return self.rewards.correct(examples, completions)

    def score(
        self,
        examples: Sequence[Example],
        completions: Sequence[str],
        lengths: Sequence[int] | None = None,
        truncated: Sequence[bool] | None = None,
    ) -> list[float | None]:
        """The training reward; see `Rewards`."""
        return self.rewards(examples, completions, lengths, truncated)


def create(config: Mapping[str, Any]) -> MathematicsTask:
    """The task from its fields (see `Mathematics`). Reads the data, and logs what became of the rows.

    Training prompts that contain an evaluation problem are left out and counted.
    """
    fields = schema.read(Mathematics, config, "config.task.mathematics")
    sets, accounts = {}, {}
    for name in dict.fromkeys([fields.train, *fields.evaluation]):
        field = f"config.task.mathematics.sources.{name}"
        read = dataset.read(name, getattr(fields.sources, name), fields.malformed, field)
        sets[name], accounts[name] = read.examples, str(read)
        dataset.report(name, read)
    held_out = {name: sets[name] for name in fields.evaluation}
    train = without(sets[fields.train], [e for examples in held_out.values() for e in examples])
    if len(train) < len(sets[fields.train]):
        contained = f"{len(sets[fields.train]) - len(train)} contain an evaluation problem"
        accounts[fields.train] += f"; {contained}"
        log.warning("%s: left out: %s", fields.train, contained)
    schema.require(
        len(train) > 0, "config.task.mathematics.train", fields.train, "a set with other problems than the evaluation's"
    )
    return MathematicsTask(
        train=[_asked(fields, e) for e in train],
        evaluation={name: [_asked(fields, e) for e in examples] for name, examples in held_out.items()},
        rewards=Rewards(fields.rewards),
        accounts=accounts,
    )


def without(train: Sequence[Example], held_out: Sequence[Example]) -> list[Example]:
    """The training examples whose prompt does not contain a held-out problem, spaces and case aside."""
    problems = {_plain(example) for example in held_out}
    kept = []
    for example in train:
        prompt = _plain(example)
        if not any(problem in prompt for problem in problems):
            kept.append(example)
    return kept


def _plain(example: Example) -> str:
    text = example.prompt if isinstance(example.prompt, str) else "\n".join(m["content"] for m in example.prompt)
    return " ".join(text.casefold().split())


def _asked(fields: Mathematics, example: Example) -> Example:
    """The example as the policy is asked it: with system message and instruction, as conversation or text."""
    messages = [dict(message) for message in example.prompt]
    if fields.instruction and not example.metadata.get("instructed"):
        messages[-1]["content"] += f"\n\n{fields.instruction}"
    if fields.system:
        messages.insert(0, {"role": "system", "content": fields.system})
    prompt = tuple(messages) if fields.chat else "\n\n".join(message["content"] for message in messages) + "\n\n"
    return dataclasses.replace(example, prompt=prompt)
