"""Length, truncation and the weighted sum, with values worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.tasks.base import Example
from jaxrl_llm.tasks.rewards import compose, length

EXAMPLES = [Example(str(i), "?", "4") for i in range(4)]
COMPLETIONS = ["#### 4", "#### 5", "x</think>#### 4", ""]


def rewards(**fields):
    return compose.Rewards(compose.read({"grader": "gsm8k", **fields}, "config.rewards"))


def test_soft_overlong_by_hand():
    found = length.soft_overlong(np.array([0, 79, 80, 81, 90, 99, 100, 101, 500]), max_length=100, buffer=20)
    np.testing.assert_allclose(found, [0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1], rtol=1e-12)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 700))
def test_soft_overlong_never_rises_with_length_and_stays_in_its_range(a, b, tokens):
    buffer, limit = sorted((a, b))
    shorter, longer = length.soft_overlong(np.array([tokens, tokens + 1]), limit, buffer)
    assert -1 <= longer <= shorter <= 0


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_only_masking_takes_truncated_responses_out_of_the_loss(array):
    truncated = array([True, False])
    for policy, kept in (("zero", [True, True]), ("keep", [True, True]), ("mask", [False, True])):
        assert length.loss_rows(policy, truncated).tolist() == kept


def test_correctness_alone():
    judge = rewards()
    assert judge(EXAMPLES, COMPLETIONS) == [1, 0, 1, 0]
    assert judge.correct(EXAMPLES, COMPLETIONS) == [1, 0, 1, 0]
    assert rewards(wrong=-1)(EXAMPLES, COMPLETIONS) == [1, -1, 1, -1]
    assert rewards(grader="exact")(EXAMPLES, ["4", " 4 ", "5", "#### 4"]) == [1, 1, 0, 0]


def test_the_sum_is_weighted():
    judge = rewards(
        weights={"correct": 2.0, "think": 0.5, "overlong": 1.0}, overlong_max_length=100, overlong_buffer=20
    )
    assert judge(EXAMPLES, COMPLETIONS, lengths=[80, 90, 100, 101]) == [2.0, -0.5, 2.0 + 0.5 - 1.0, -1.0]
    formatted = rewards(weights={"correct": 0.0, "format": 3.0})
    assert formatted(EXAMPLES, [r"\boxed{9}", "9", "Answer: 9", ""]) == [3, 0, 3, 0]


def test_truncated_responses():
    cut = [True, False, False, True]
    weights = {"think": 0.5}
    assert rewards(truncated="zero", weights=weights)(EXAMPLES, COMPLETIONS, truncated=cut) == [0, 0, 1.5, 0]
    assert rewards(truncated="zero", wrong=-1)(EXAMPLES, COMPLETIONS, truncated=cut) == [-1, -1, 1, -1]
    for policy in ("keep", "mask"):
        assert rewards(truncated=policy, weights=weights)(EXAMPLES, COMPLETIONS, truncated=cut) == [1, 0, 1.5, 0]


def test_a_failed_grade_is_no_reward_whatever_else_there_is():
    config = compose.read({"weights": {"think": 1.0}}, "config.rewards")
    assert compose.combine(config, [None, 1.0, 0.0, 0.5], ["a</think>b"] * 4) == [None, 2.0, 1.0, 1.5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grader": "maths"}, "config.rewards.grader is 'maths'; choose from: 'math', 'exact', 'gsm8k'"),
        ({"weights": {"lenght": 1.0}}, "unknown field config.rewards.weights.lenght; choose from: .*overlong"),
        ({"weights": {"overlong": 1.0}}, "rewards.overlong_max_length is 0; it must be positive"),
        (
            {"weights": {"overlong": 1.0}, "overlong_max_length": 10, "overlong_buffer": 20},
            "rewards.overlong_buffer is 20; it must be between 1 and overlong_max_length = 10",
        ),
        ({"wrong": 1.0}, "rewards.wrong is 1.0; it must be 0 or negative"),
        ({"truncated": "drop"}, "config.rewards.truncated is 'drop'; choose from: 'zero', 'keep', 'mask'"),
    ],
)
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        rewards(**fields)


def test_what_a_part_needs_is_asked_for():
    with pytest.raises(ValueError, match="needs the truncated of the responses"):
        rewards(truncated="zero")(EXAMPLES, COMPLETIONS)
    judge = rewards(weights={"overlong": 1.0}, overlong_max_length=10, overlong_buffer=5)
    with pytest.raises(ValueError, match="needs the lengths of the responses"):
        judge(EXAMPLES, COMPLETIONS)
