"""Completions for people to read and for programs: what the policy wrote before RL, after it, and at every evaluation.

The evaluations of a run ask the same prompts in the same order, so that `before.md` and `after.md` can be read side by
side.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm.experience.scored_rollout import ScoredRollout
from jaxrl_llm.types import FinishReason

CELL = 60  # characters; rows with longer texts are written as sections, not as a table


def write(folder: pathlib.Path, name: str, title: str, scored: ScoredRollout, limit: int = 32) -> pathlib.Path:
    """Writes the first `limit` completions as `<name>.md` and all of them as `<name>.jsonl`. Only process 0 writes.

    Args:
      folder: an existing directory.
      name: of the files, without ending.
      title: heading of the page.
      scored: what was sampled.
      limit: completions on the page.

    Returns:
      The path of the page.
    """
    page = folder / f"{name}.md"
    if jax.process_index() == 0:
        rows = _rows(scored)
        _replace(folder / f"{name}.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        _replace(page, "\n".join(_page(title, rows, limit)) + "\n")
    return page


def _rows(scored: ScoredRollout) -> list[dict[str, Any]]:
    rows = scored.examples, scored.completions, scored.rewards, scored.rollout.finish_reason
    columns = zip(*rows, strict=True)
    return [
        {
            "id": example.id,
            "prompt": example.prompt if isinstance(example.prompt, str) else [dict(turn) for turn in example.prompt],
            "completion": completion,
            "answer": example.answer,
            "reward": None if math.isnan(reward) else float(reward),
            "finish": FinishReason(int(reason)).name.lower(),
        }
        for example, completion, reward, reason in columns
    ]


def _page(title: str, rows: Sequence[Mapping[str, Any]], limit: int) -> list[str]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no rewards"
    head = [f"# {title}", "", f"{mean} over {len(rows)} completions"]
    shown = [
        {"prompt": _prompt(r["prompt"]), "completion": r["completion"], "answer": r["answer"], "reward": _reward(r)}
        for r in rows[:limit]
    ]
    if len(shown) < len(rows):
        head[-1] += f", the first {len(shown)} of them here"
    short = all(len(text) <= CELL and "\n" not in text for row in shown for text in row.values())
    return [*head, "", *(_table(shown) if short else _sections(shown))]


def _table(shown: Sequence[Mapping[str, str]]) -> list[str]:
    lines = ["| prompt | completion | answer | reward |", "|---|---|---|---|"]
    for row in shown:
        cells = [_code(row[name]).replace("|", "\\|") for name in ("prompt", "completion", "answer")]
        lines.append(f"| {' | '.join(cells)} | {row['reward']} |")
    return lines


def _sections(shown: Sequence[Mapping[str, str]]) -> list[str]:
    lines = []
    for number, row in enumerate(shown, 1):
        lines += [f"## {number}. reward {row['reward']}, answer {_code(row['answer'])}", ""]
        for name in ("prompt", "completion"):
            lines += [f"{name}:", "", *_block(row[name]), ""]
    return lines


def _prompt(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"[{turn['role']}] {turn['content']}" for turn in prompt)


def _reward(row: Mapping[str, Any]) -> str:
    reward = "grader failed" if row["reward"] is None else f"{row['reward']:g}"
    return reward + (" (cut at the limit)" if row["finish"] == "length" else "")


def _code(text: str) -> str:
    """An inline code span that may hold backticks: its fence is longer than any of theirs."""
    fence = "`" * (_longest_ticks(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    text = text.replace("\n", "⏎")
    return f"{fence}{pad}{text}{pad}{fence}" if text else "(empty)"


def _block(text: str) -> list[str]:
    fence = "`" * max(3, _longest_ticks(text) + 1)
    return [f"{fence}text", text, fence]


def _longest_ticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes in one piece: a killed run leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
