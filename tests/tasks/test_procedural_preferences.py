"""The rule by hand, the judge's noise against its probability, and splits that share no prompt."""

import math

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks.procedural_preferences import preference, utility


def make(**fields):
    return tasks.create({"name": "procedural_preferences", "procedural_preferences": fields})


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("", 0), ("bfa", 3), ("afb", 3), ("bf", 2), ("bfah", 2.5), ("bbb", 0), ("hhhhhh", -3), ("bfab", 2.5)],
)
def test_the_rule_by_hand(reply, expected):
    assert utility("bfa?", reply) == expected


def test_scores_are_shares_of_the_best_and_a_judge_takes_their_place():
    task = make()
    examples = task.evaluation["held_out"][:2]
    ideal = [e.prompt[:3] for e in examples]
    assert task.score(examples, ideal) == [1.0, 1.0]
    judged = task.with_judge(lambda examples, replies: [float(len(r)) for r in replies])
    assert judged.score(examples, ["a", "abc"]) == [1.0, 3.0]
    assert task.score(examples, ideal) == [1.0, 1.0]


def test_splits_share_no_prompt_and_examples_are_a_function_of_the_index():
    task = make(train_size=500, eval_size=50)
    train, held_out = task.train[:], task.evaluation["held_out"][:]
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}
    assert make(train_size=500).train[7] == train[7] == task.train[-493]
    assert all(len(set(e.prompt[:3])) == 3 and 1 <= len(e.solution) <= 6 for e in train)


def test_the_judge_prefers_as_often_as_its_probability_says():
    examples = make(train_size=3000, noise=0.5).train[:]
    differences = [
        utility(e.prompt, e.metadata["chosen"]) - utility(e.prompt, e.metadata["rejected"]) for e in examples
    ]
    for size in (0.5, 1.0):
        of_size = [d for d in differences if abs(d) == size]
        share, expected = np.mean([d > 0 for d in of_size]), 1 / (1 + math.exp(-size / 0.5))
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / len(of_size))
    never_wrong = make(noise=0.0).train[:300]
    assert all(
        utility(e.prompt, e.metadata["chosen"]) >= utility(e.prompt, e.metadata["rejected"]) for e in never_wrong
    )
    assert [preference(d, 0.0) for d in (-1, 0, 1)] == [0, 0.5, 1]


def test_a_wrong_field_is_named():
    with pytest.raises(ValueError, match="config.task.procedural_preferences.noise is -1.0; it must be 0 or more"):
        make(noise=-1.0)
