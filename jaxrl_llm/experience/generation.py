"""Prompts in, completions out, as lines for people's own programs."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.experience.scored_rollout import decode
from jaxrl_llm.tasks import Example
from jaxrl_llm.types import FinishReason, Rollout


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
    return [Example(f"prompt-{i}", p if isinstance(p, str) else tuple(p), "") for i, p in enumerate(prompts)]


def rows(rollout: Rollout, examples: Sequence[Example], tokenizer: Any) -> list[dict[str, Any]]:
    """One JSON-ready mapping for each response, group-major: text, ids and the log-prob of every token as it was drawn."""
    completions, lengths = decode(rollout, tokenizer), rollout.response_mask.sum(axis=1)
    group = len(lengths) // max(len(examples), 1)
    return [
        {
            "prompt": examples[i // group].prompt,
            "sample": i % group,
            "completion": completion,
            "finish": FinishReason(int(rollout.finish_reason[i])).name.lower(),
            "tokens": rollout.response_tokens[i, : lengths[i]].tolist(),
            "logprobs": [round(float(x), 6) for x in rollout.behavior_logprobs[i, : lengths[i]]],
        }
        for i, completion in enumerate(completions)
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
