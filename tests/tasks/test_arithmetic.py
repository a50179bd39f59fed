"""The embedded task: true answers, splits that share nothing, errors that name their field."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import tasks
from jaxrl_llm.tasks.arithmetic import evaluate, running_totals


def make(**fields):
    return tasks.create({"name": "arithmetic", "arithmetic": fields})


@settings(max_examples=25, deadline=None)
@given(index=st.integers(0, 99_999), seed=st.integers(0, 5))
def test_every_answer_is_true_and_every_solution_is_rewarded(index, seed):
    task = make(seed=seed, eval_size=8, kinds=("add2", "sub3", "mul2", "sum4", "mix4"))
    example = task.train[index]
    assert eval(example.prompt.rstrip("=")) == int(example.answer) >= 0
    assert task.score([example] * 2, [example.solution, example.solution + "1"]) == [1.0, 0.0]


def test_training_and_held_out_prompts_never_meet():
    for seed in (0, 1):
        train, held_out = make(train_size=3000, seed=seed, eval_size=200).train, make(seed=1 - seed, eval_size=200)
        held_out = [e.prompt for e in held_out.evaluation["held_out"]]
        assert not {e.prompt for e in train} & set(held_out)
        assert len(set(held_out)) == 200


def test_examples_are_a_function_of_seed_and_index():
    a, b = make(eval_size=8), make(eval_size=8)
    assert [e.prompt for e in a.train[5:9]] == [b.train[i].prompt for i in range(5, 9)]
    assert a.train[0].prompt != make(eval_size=8, seed=1).train[0].prompt
    with pytest.raises(IndexError):
        a.train[len(a.train)]


def test_running_totals():
    assert running_totals("3+4-2") == [7, 5]
    assert running_totals("12*3") == [36]
    assert evaluate("2+3*4-1") == 13


def test_scores_read_the_last_number():
    example = make(eval_size=8, kinds=("sum3",)).train[0]
    right = example.answer
    assert make(eval_size=8).score([example] * 4, [right, f">1,{right}", f"{right},", ""]) == [1.0, 1.0, 0.0, 0.0]


def test_a_hasty_teacher_guesses_as_often_as_told():
    task = make(eval_size=8, kinds=("sum4",), guessed_demonstrations=0.3)
    examples = task.train[:2000]
    guessed = sum(not e.solution.startswith(">") for e in examples) / 2000
    assert 0.26 < guessed < 0.34
    right = sum(e.solution == e.answer for e in examples) / (2000 * guessed)
    assert 0.08 < right < 0.22
    assert all(e.solution.startswith(">") for e in make(eval_size=8, kinds=("sum4",)).train[:50])


def test_tokenizer_round_trip_and_unknown_characters():
    tokenizer = make(eval_size=8).tokenizer
    ids = tokenizer.encode("12+3=")
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode([*ids, tokenizer.eos_token_id]) == "12+3="
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False) == "<eos>"
    with pytest.raises(ValueError, match="character 'x'"):
        tokenizer.encode("1x")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "arithmetics"}, "unknown task config.task.name 'arithmetics'; choose from: arithmetic"),
        (
            {"name": "arithmetic", "arithmetic": {"kind": ()}},
            "unknown field config.task.arithmetic.kind; choose from: .*kinds",
        ),
        (
            {"name": "arithmetic", "arithmetic": {"kinds": ("div2",)}},
            "config.task.arithmetic.kinds is 'div2'; it must be one of add",
        ),
        (
            {"name": "arithmetic", "arithmetic": {"kinds": ("sum2",)}},
            "config.task.arithmetic.eval_size is 512; .*'sum2' has too few",
        ),
        ({"name": "arithmetic", "arithmetic": {"train_size": True}}, "config.task.arithmetic.train_size is True"),
        ({"name": "arithmetic", "arithmetics": {}}, "unknown field config.task.arithmetics"),
    ],
)
def test_bad_configurations_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        tasks.create(config)
