"""Completions on paper: complete for programs, readable for people, whatever they contain."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.experience.scored_rollout import ScoredRollout
from jaxrl_llm.records import samples
from jaxrl_llm.tasks import Example
from jaxrl_llm.types import FinishReason, Rollout


def scored(rows):
    """rows: (prompt, completion, answer, reward, finish)."""
    prompts, completions, answers, rewards, reasons = zip(*rows, strict=True)
    n, zeros = len(rows), jnp.zeros((len(rows), 1))
    rollout = Rollout(
        prompt_tokens=zeros,
        prompt_mask=zeros,
        response_tokens=zeros,
        response_mask=zeros,
        finish_reason=jnp.array(reasons, jnp.int32),
        behavior_logprobs=zeros,
        group_ids=jnp.arange(n),
        log_kept_mass=zeros,
    )
    examples = [
        Example(prompt=p, answer=a, id=f"id-{i}") for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    return ScoredRollout(rollout, examples, list(completions), np.array(rewards, np.float64))


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_short_ones_make_a_table(tmp_path):
    rows = [("1+1=", "2", "2", 1.0, STOP), ("a|b=", "x`y", "2", 0.0, LENGTH), ("3=", "", "3", float("nan"), STOP)]
    page = samples.write(tmp_path, "before", "Before RL", scored(rows))
    assert page == tmp_path / "before.md"
    assert page.read_text() == "\n".join(
        [
            "# Before RL",
            "",
            "mean reward 0.500 over 3 completions",
            "",
            "| prompt | completion | answer | reward |",
            "|---|---|---|---|",
            "| `1+1=` | `2` | `2` | 1 |",
            "| `a\\|b=` | ``x`y`` | `2` | 0 (cut at the limit) |",
            "| `3=` | (empty) | `3` | grader failed |",
            "",
        ]
    )
    lines = [json.loads(line) for line in (tmp_path / "before.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "id": "id-0",
        "prompt": "1+1=",
        "completion": "2",
        "answer": "2",
        "reward": 1.0,
        "finish": "stop",
    }
    assert [line["reward"] for line in lines] == [1.0, 0.0, None]
    assert [line["finish"] for line in lines] == ["stop", "length", "stop"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["before.jsonl", "before.md"]


def test_long_ones_make_sections_that_keep_every_character(tmp_path):
    completion = "First line\n```python\nprint('|')\n```\n$x < y$ & é \u2028 end"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    rows = [(chat, completion, "42", 0.5, STOP)]
    page = samples.write(tmp_path, "after", "After RL", scored(rows)).read_text()
    assert "## 1. reward 0.5, answer `42`" in page
    assert "```text\n[system] Be brief.\n[user] Why?\n```" in page
    assert f"````text\n{completion}\n````" in page
    lines = (tmp_path / "after.jsonl").read_text().split("\n")
    assert len(lines) == 2 and lines[1] == ""
    assert json.loads(lines[0])["completion"] == completion
    assert json.loads(lines[0])["prompt"] == chat


def test_the_page_is_cut_and_the_file_is_not(tmp_path):
    rows = [(f"{i}=", str(i), str(i), 1.0, STOP) for i in range(10)]
    page = samples.write(tmp_path, "x", "X", scored(rows), limit=3).read_text()
    assert "mean reward 1.000 over 10 completions, the first 3 of them here" in page
    assert page.count("\n| `") == 3
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 10


def test_no_reward_at_all(tmp_path):
    page = samples.write(tmp_path, "x", "X", scored([("1=", "1", "1", float("nan"), STOP)])).read_text()
    assert "no rewards over 1 completions" in page


def test_writing_again_replaces(tmp_path):
    for reward in (0.0, 1.0):
        samples.write(tmp_path, "x", "X", scored([("1=", "1", "1", reward, STOP)]))
    assert json.loads((tmp_path / "x.jsonl").read_text())["reward"] == 1.0


@pytest.mark.parametrize(
    ("text", "code"), [("a", "`a`"), ("`a`", "`` `a` ``"), ("a``b", "```a``b```"), ("`", "`` ` ``"), ("a\nb", "`a⏎b`")]
)
def test_code_spans(text, code):
    assert samples._code(text) == code
