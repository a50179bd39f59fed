"""Procedural tasks of the reasoning-gym library (optional: pip install reasoning-gym), judged by the library itself.

As in `arithmetic`, a checksum of the question decides its split, so that training and held-out questions never meet.
The judges run in the graders' pool, because some of them evaluate what they are given.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm import schema
from jaxrl_llm.tasks.base import Example, Task
from jaxrl_llm.tasks.rewards.pool import GraderPool, PoolConfig

HELD_OUT_SHARE = 10  # one question in ten
_TRIES = 1000
_STRIDE = 1_000_003  # from one candidate of an index to the next


@dataclasses.dataclass(frozen=True)
class Puzzles:
    """Fields of the task.

    Attributes:
      datasets: reasoning-gym's names, in equal shares.
      parameters: data set -> its own fields, such as {"leg_counting": {"max_animals": 5}}. A data set that makes all its
        entries at once needs a "size" there.
      train_size, eval_size: examples of the two splits.
      seed: of the examples.
      instruction: appended to every question.
      chat: whether prompts are conversations, for chat models, or plain text.
      pool: processes of the judges.
    """

    datasets: tuple[str, ...] = ("leg_counting",)
    parameters: Mapping = dataclasses.field(default_factory=dict)
    train_size: int = 100_000
    eval_size: int = 200
    seed: int = 0
    instruction: str = "Give the final answer alone between <answer> and </answer>."
    chat: bool = True
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)

    def __post_init__(self):
        for name in ("datasets", "train_size", "eval_size"):
            value = getattr(self, name)
            right = "positive" if name != "datasets" else "at least one name"
            schema.require(
                bool(value) and (name == "datasets" or value > 0), f"config.task.puzzles.{name}", value, right
            )
        for name in self.parameters:
            schema.require(name in self.datasets, "config.task.puzzles.parameters", name, f"one of {self.datasets}")


class Examples(Sequence):
    """`size` questions of one split, made when they are asked for; the held-out ones are all different."""

    def __init__(self, fields: Puzzles, sets: Sequence[Any], held_out: bool, size: int):
        self.fields, self.sets, self.held_out, self.size = fields, sets, held_out, size
        self._candidates = self._distinct() if held_out else None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        index = int(index) % self.size
        name = self.fields.datasets[index % len(self.sets)]
        entry = self._entry(index, self._candidates[index] if self.held_out else self._candidate(index))
        text = entry["question"].strip() + (f"\n\n{self.fields.instruction}" if self.fields.instruction else "")
        prompt = ({"role": "user", "content": text},) if self.fields.chat else text + "\n\n"
        split = "eval" if self.held_out else "train"
        return Example(f"{split}-{index}", prompt, str(entry["answer"]), metadata={"dataset": name, "entry": entry})

    def _entry(self, index: int, candidate: int) -> Mapping[str, Any]:
        return self.sets[index % len(self.sets)][candidate]

    def _candidate(self, index: int, seen: Mapping[str, int] | None = None) -> int:
        """Number of the first entry for `index` that belongs to this split (and is not among `seen`)."""
        for attempt in range(_TRIES):
            candidate = (index + attempt * _STRIDE) % len(self.sets[index % len(self.sets)])
            question = self._entry(index, candidate)["question"]
            if is_held_out(question) == self.held_out and (seen is None or question not in seen):
                return candidate
        name = self.fields.datasets[index % len(self.sets)]
        raise ValueError(
            f"config.task.puzzles.{'eval' if self.held_out else 'train'}_size is {self.size}; data set {name!r} has too few"
            " different questions for it"
        )

    def _distinct(self) -> list[int]:
        candidates, seen = [], {}
        for index in range(self.size):
            candidates.append(self._candidate(index, seen))
            seen[self._entry(index, candidates[-1])["question"]] = index
        return candidates


@dataclasses.dataclass(frozen=True)
class PuzzlesTask(Task):
    """See the module docstring."""

    train: Examples
    evaluation: Mapping[str, Examples]
    pool: GraderPool
    tokenizer: None = None
    truncated: str = "keep"
    name: str = "puzzles"

    def grade(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float | None]:
        """The library's score in [0, 1] of what stands between the last <answer> tags, or of the final answer."""
        return self.pool.grade(
            [
                {"completion": completion, "dataset": e.metadata["dataset"], "entry": e.metadata["entry"]}
                for e, completion in zip(examples, completions, strict=True)
            ]
        )


def create(config: Mapping[str, Any]) -> PuzzlesTask:
    """The task from its fields (see `Puzzles`).

    Raises:
      ValueError: reasoning-gym is not installed, or does not know a data set or one of its parameters.
    """
    fields = schema.read(Puzzles, config, "config.task.puzzles")
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(f"task 'puzzles' needs reasoning-gym (pip install reasoning-gym): {error}") from None
    sets = []
    for name in fields.datasets:
        try:
            parameters = {"size": 2**31, "seed": fields.seed, **fields.parameters.get(name, {})}
            sets.append(reasoning_gym.create_dataset(name, **parameters))
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"config.task.puzzles: reasoning-gym's data set {name!r}: {error}") from None
    return PuzzlesTask(
        train=Examples(fields, sets, held_out=False, size=fields.train_size),
        evaluation={"held_out": Examples(fields, sets, held_out=True, size=fields.eval_size)},
        pool=GraderPool("reasoning_gym", fields.pool),
    )


def is_held_out(question: str) -> bool:
    """Which split a question belongs to."""
    return zlib.crc32(" ".join(question.split()).encode()) % HELD_OUT_SHARE == 0
