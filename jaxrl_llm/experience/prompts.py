"""Which prompts come next, as token ids."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.experience.data_order import example_indices
from jaxrl_llm.tasks import Example
from jaxrl_llm.tasks.prompts import encode


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Examples with their token ids, those over the length limit left out.

    Attributes:
      examples: what was asked.
      tokens: token ids of each prompt.
      dropped: examples left out because their prompt is too long.
    """

    examples: Sequence[Example]
    tokens: Sequence[list[int]]
    dropped: int

    def __len__(self) -> int:
        return len(self.tokens)


def tokenize(examples: Sequence[Example], tokenizer: Any, limit: int) -> Prompts:
    """Token ids of every prompt (see `prompts.encode`); those longer than `limit` tokens are left out and counted."""
    kept, tokens = [], []
    for example in examples:
        ids = encode(tokenizer, example)
        if len(ids) <= limit:
            kept.append(example)
            tokens.append(ids)
    return Prompts(kept, tokens, dropped=len(examples) - len(kept))


def next_prompts(
    train: Sequence[Example], tokenizer: Any, limit: int, seed: int, position: int, count: int
) -> tuple[Prompts, int]:
    """The next `count` training prompts of at most `limit` tokens from the shuffled stream.

    Args:
      train: all training examples.
      tokenizer: see `prompts.encode`.
      limit: tokens of the longest prompt; longer ones are passed over and counted.
      seed, position: of the stream; see `data.example_indices`.
      count: prompts wanted.

    Returns:
      The prompts, and the position after the last example that was looked at.

    Raises:
      ValueError: not one prompt of a whole epoch fits.
    """
    examples: list[Example] = []
    tokens: list[list[int]] = []
    start = position
    while len(tokens) < count:
        indices = example_indices(seed, position, count - len(tokens), len(train))
        fitting = tokenize([train[i] for i in indices], tokenizer, limit)
        examples += fitting.examples
        tokens += fitting.tokens
        position += len(indices)
        if not tokens and position - start >= len(train):
            raise ValueError(f"config.rollout.max_prompt_length is {limit}; not one training prompt is that short")
    return Prompts(examples, tokens, dropped=position - start - count), position
