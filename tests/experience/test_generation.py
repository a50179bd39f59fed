"""Prompts from files, lines out, pass@k of what was scored, and the policy of a run directory."""

import json

import numpy as np
import pytest

from jaxrl_llm.api import loaded_run
from jaxrl_llm.experience import generation
from jaxrl_llm.experience.evaluation import pass_at
from jaxrl_llm.experience.scored_rollout import ScoredRollout
from jaxrl_llm.tasks.tokenizer import CharTokenizer
from jaxrl_llm.types import FinishReason, Rollout


def test_prompts_of_the_command_line_come_before_those_of_a_file(tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("1+2=\n\n3+4=\n")
    assert [e.prompt for e in generation.read_prompts(["0+0="], str(text))] == ["0+0=", "1+2=", "3+4="]
    lines = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "two?"}]
    lines.write_text(json.dumps({"prompt": "one?", "other": 1}) + "\n" + json.dumps({"prompt": turns}) + "\n")
    assert [e.prompt for e in generation.read_prompts([], str(lines))] == ["one?", tuple(turns)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\nnonsense\n', 'bad.jsonl, line 2 is not a JSON object with a field "prompt"'),
        ('{"text": "a"}\n', 'bad.jsonl, line 1 is not a JSON object with a field "prompt"'),
        ('{"prompt": ""}\n', "bad.jsonl, line 1: the prompt is ''; it must be text or a list of chat messages"),
        ('{"prompt": 3}\n', "bad.jsonl, line 1: the prompt is 3"),
        ("\n", "no prompts: give --prompt"),
    ],
)
def test_bad_prompt_files_are_named_by_line(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        generation.read_prompts([], str(path))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"prompt file '.*absent.txt' cannot be read: No such file"):
        generation.read_prompts([], str(tmp_path / "absent.txt"))
    with pytest.raises(ValueError, match="nowhere is not a run directory: it has no config.json"):
        loaded_run.load(str(tmp_path / "nowhere"))


def rollout():
    """Two prompts, two responses each: "12" and an end, "1" cut at three tokens, and so on."""
    tokens = np.array([[4, 5, 2], [4, 4, 4], [2, 0, 0], [5, 2, 0]], np.int32)
    lengths = np.array([3, 3, 1, 2])
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    return Rollout(
        prompt_tokens=np.ones((4, 1), np.int32),
        prompt_mask=np.ones((4, 1), bool),
        response_tokens=tokens,
        response_mask=np.arange(3) < lengths[:, None],
        finish_reason=np.array([stop, length, stop, stop]),
        behavior_logprobs=-np.arange(12, dtype=np.float32).reshape(4, 3),
        group_ids=np.array([0, 0, 1, 1]),
        log_kept_mass=np.zeros((4, 3), np.float32),
    )


def test_rows_hold_text_ids_and_log_probs_of_the_real_tokens():
    examples = generation.read_prompts(["a", "b"], None)
    rows = [c.line() for c in generation.completions(rollout(), examples, CharTokenizer("0123"))]
    assert rows[0] == {
        "prompt": "a",
        "sample": 0,
        "completion": "12",
        "finish": "stop",
        "tokens": [4, 5, 2],
        "logprobs": [0.0, -1.0, -2.0],
    }
    assert [row["prompt"] for row in rows] == ["a", "a", "b", "b"]
    assert [row["completion"] for row in rows] == ["12", "111", "", "2"]
    assert [row["finish"] for row in rows] == ["stop", "length", "stop", "stop"]
    assert rows[3]["tokens"] == [5, 2]
    json.dumps(rows)


def test_pass_at_k_by_hand():
    # One of four correct, and three of four (the grader of the fourth failed).
    rewards = np.array([1.0, 0, 0, 0, 1, 1, 1, np.nan])
    result = pass_at(ScoredRollout(rollout(), [], [], rewards), samples=4)
    assert sorted(result) == [1, 2, 4]
    # k = 2: 1 - C(3, 2) / C(4, 2) = 0.5, and 1.
    for k, values in ((1, (0.25, 0.75)), (2, (0.5, 1.0)), (4, (1.0, 1.0))):
        mean, low, high = result[k]
        assert mean == pytest.approx(np.mean(values))
        half = 1.959964 * np.std(values, ddof=1) / np.sqrt(2)
        # The interval of shares ends at 0 and 1.
        assert (low, high) == pytest.approx((max(mean - half, 0.0), min(mean + half, 1.0)))
