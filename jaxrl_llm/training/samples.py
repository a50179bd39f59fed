"""Completions for people to read: Markdown for the eye, JSONL for programs."""

import json
import pathlib

from jaxrl_llm.training.collect import Collected


def write(folder: pathlib.Path, name: str, title: str, collected: Collected, limit: int = 32) -> pathlib.Path:
    """Writes the first `limit` completions as `<name>.md` and all of them as `<name>.jsonl`; returns the former."""
    rows = [
        {"id": example.id, "prompt": example.prompt, "completion": text, "answer": example.answer, "reward": float(reward)}
        for example, text, reward in zip(collected.examples, collected.completions, collected.rewards, strict=True)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"# {title}", "", "| prompt | completion | answer | reward |", "|---|---|---|---|"]
    lines += [
        f"| {_cell(r['prompt'])} | {_cell(r['completion'])} | {_cell(r['answer'])} | {r['reward']:g} |"
        for r in rows[:limit]
    ]
    path = folder / f"{name}.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _cell(text) -> str:
    if not isinstance(text, str):
        text = text[-1]["content"]
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ⏎ ") + "`"
