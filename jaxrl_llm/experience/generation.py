"""Prompts in, completions out, as lines for people's own programs."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm import schema
from jaxrl_llm.experience.scored_rollout import decode
from jaxrl_llm.tasks import Example
from jaxrl_llm.types import FinishReason, Rollout, TopKView


def read_prompts(given: Sequence[str], file: str | None) -> list[Example]:
    """Prompts from the command line, then those of a file: one a line, or JSON lines with a field "prompt".

    Raises:
      ValueError: no prompt at all, a file that is not there, or a line that has no prompt; names file and line.
    """
    prompts: list[Any] = list(given)
    if file is not None:
        try:
            lines = pathlib.Path(file).read_text().splitlines()
        except OSError as error:
            raise ValueError(f"prompt file {file!r} cannot be read: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompts.append(_prompt(line, f"{file}, line {number}") if file.endswith(".jsonl") else line)
    if not prompts:
        raise ValueError("no prompts: give --prompt (any number of times) or --prompts_file")
    return as_examples(prompts)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled response.

    Attributes:
      prompt: text or chat messages.
      sample: which of the prompt's completions, from 0.
      text: without the end token.
      finish: "stop" at an end token, "length" at the limit.
      tokens: ids, the end token included.
      logprobs: float32 [tokens], log mu of each under the distribution that it was drawn from, nats.
      topk: top-K view of these distributions ([tokens, K] ids and log-probs), or None where none was captured.
    """

    prompt: Any
    sample: int
    text: str
    finish: str
    tokens: list[int]
    logprobs: np.ndarray
    topk: TopKView | None = None

    def line(self) -> dict[str, Any]:
        """JSON-ready, without the top-K view."""
        return {
            "prompt": self.prompt,
            "sample": self.sample,
            "completion": self.text,
            "finish": self.finish,
            "tokens": self.tokens,
            "logprobs": [round(float(x), 6) for x in self.logprobs],
        }


def as_examples(prompts: Sequence[Any]) -> list[Example]:
    """Prompts, texts or chats, as examples without an answer.

    Raises:
      ValueError: no prompt, or an empty one; says which.
    """
    schema.require(len(prompts) > 0, "prompts", prompts, "at least one prompt")
    for i, prompt in enumerate(prompts):
        schema.require(len(prompt) > 0, f"prompts[{i}]", prompt, "text or a list of chat messages, not empty")
    return [Example(f"prompt-{i}", p if isinstance(p, str) else tuple(p), "") for i, p in enumerate(prompts)]


def completions(rollout: Rollout, examples: Sequence[Example], tokenizer: Any) -> list[Completion]:
    """The responses of a rollout one by one, group-major."""
    texts, lengths = decode(rollout, tokenizer), rollout.response_mask.sum(axis=1)
    group = len(lengths) // max(len(examples), 1)
    view = rollout.topk
    return [
        Completion(
            prompt=examples[i // group].prompt,
            sample=i % group,
            text=text,
            finish=FinishReason(int(rollout.finish_reason[i])).name.lower(),
            tokens=rollout.response_tokens[i, : lengths[i]].tolist(),
            logprobs=rollout.behavior_logprobs[i, : lengths[i]],
            topk=None if view is None else TopKView(view.ids[i, : lengths[i]], view.logprobs[i, : lengths[i]]),
        )
        for i, text in enumerate(texts)
    ]


def _prompt(line: str, where: str) -> Any:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f'{where} is not a JSON object with a field "prompt"') from None
    messages = isinstance(prompt, list) and all(isinstance(turn, dict) for turn in prompt)
    if not (isinstance(prompt, str) or messages) or not prompt:
        raise ValueError(f"{where}: the prompt is {prompt!r}; it must be text or a list of chat messages")
    return prompt
