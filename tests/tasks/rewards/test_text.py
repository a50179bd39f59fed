"""Answers found in completions, and the rewards that need nothing but the text."""

import pytest

from jaxrl_llm.tasks.rewards import extract, text


@pytest.mark.parametrize(
    ("completion", "answer", "verdict"),
    [
        ("2+2=4\n#### 4", "4", 1.0),
        ("#### 1,080", "1080", 1.0),
        ("#### $1,080.00", "1080", 1.0),
        ("#### 3\nno\n#### 4", "4", 1.0),
        ("#### 4\nno\n#### 3", "4", 0.0),
        ("####4", "4", 1.0),
        ("#### -4", "-4", 1.0),
        ("#### 4.5", "4", 0.0),
        ("the answer is 4", "4", 0.0),
        ("####", "4", 0.0),
        ("#### four", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_gsm8k(completion, answer, verdict):
    assert text.gsm8k(completion, answer) == verdict


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        ("<think>two and two</think> four", 1.0),
        ("two and two</think> four", 1.0),  # the template opened the thoughts
        ("\n<think>\na\n</think>\n\nb", 1.0),
        ("<think>two and two</think>", 0.0),
        ("<think>two and two", 0.0),
        ("four", 0.0),
        ("well <think>a</think> b", 0.0),
        ("<think>a</think> b </think> c", 0.0),
        ("<think>a<think>b</think> c", 0.0),
        ("a</think> b <think>", 0.0),
        ("", 0.0),
    ],
)
def test_thoughts_are_closed_once_and_followed_by_an_answer(completion, verdict):
    assert text.think_format(completion) == verdict


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        (r"so \boxed{4}", 1.0),
        ("so\nAnswer: 4", 1.0),
        ("4", 0.0),
        (r"<think>\boxed{4}</think> four", 0.0),
        (r"\boxed{4}</think> \boxed{5}", 1.0),
        (r"\boxed{}", 0.0),
        ("Answer:", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_marked_by_a_box_or_a_line(completion, verdict):
    assert text.answer_format(completion) == verdict


def test_exact_match_forgives_spaces_around_it_alone():
    assert [text.exact_match(c, "ab c") for c in ("ab c", " ab c\n", "ab  c", "AB c", "")] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("<answer>3</answer> no, <answer>1 2\n3 4</answer>", "1 2\n3 4"),
        ("<answer></answer>", None),
        (r"\boxed{5}", "5"),
        ("nothing\nhere", None),
    ],
)
def test_tagged_answers(completion, answer):
    assert extract.tagged_answer(completion) == answer
