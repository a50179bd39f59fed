"""Word problems: truths recomputed from the text, disjoint splits, the last number counts."""

import re

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks import word_problems


def truth(kind, text):
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    if kind in ("gain", "lose", "boxes"):
        a, b = numbers
        return {"gain": a + b, "lose": a - b, "boxes": a * b}[kind]
    a, b, c = numbers
    return a + b - c if kind == "gain_lose" else a + b * c


def test_every_answer_follows_from_the_text_and_none_is_negative():
    task = tasks.create({"name": "word_problems"})
    for example in [*task.train[:300], *task.evaluation["held_out"]]:
        text = example.prompt[0]["content"]
        assert int(example.answer) == truth(example.metadata["kind"], text) >= 0, text


def test_examples_repeat_and_the_splits_are_disjoint():
    task, again = (tasks.create({"name": "word_problems"}) for _ in range(2))
    assert task.train[:50] == again.train[:50]
    held_out = [e.prompt[0]["content"] for e in task.evaluation["held_out"]]
    assert len(set(held_out)) == len(held_out) == 256
    assert not set(held_out) & {e.prompt[0]["content"] for e in task.train[:3000]}


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("The answer is 12.", 1.0),
        ("5 + 7 = 12", 1.0),
        ("12 apples and 3 pears", 0.0),
        ("12.0", 1.0),
        ("$12.50", 0.0),
        ("twelve", 0.0),
        ("", 0.0),
        ("-12", 0.0),
    ],
)
def test_the_last_number_counts(completion, right):
    example = tasks.Example("x", "?", "12")
    assert tasks.create({"name": "word_problems"}).grade([example], [completion]) == [right]


def test_thousands_are_read():
    assert word_problems.last_number("it is 1,234.5") == 1234.5


def test_bad_fields_are_named():
    with pytest.raises(ValueError, match="unknown kind in config.task.word_problems.kinds 'divide'"):
        tasks.create({"name": "word_problems", "word_problems": {"kinds": ("divide",)}})
    with pytest.raises(ValueError, match="config.task.word_problems.largest is 1; it must be 2 or more"):
        tasks.create({"name": "word_problems", "word_problems": {"largest": 1}})
    with pytest.raises(ValueError, match="config.task.word_problems.eval_size is 200; it must be smaller"):
        tasks.create({"name": "word_problems", "word_problems": {"kinds": ("gain",), "largest": 2, "eval_size": 200}})
