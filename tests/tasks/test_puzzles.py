"""reasoning-gym's tasks where the library is installed, and one clear error where it is not."""

import importlib.util

import pytest

from jaxrl_llm import tasks

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None


def make(**fields):
    fields = {"train_size": 20, "eval_size": 6, "pool": {"workers": 1}} | fields
    return tasks.create({"name": "puzzles", "puzzles": fields})


@pytest.mark.skipif(INSTALLED, reason="reasoning-gym is installed")
def test_the_missing_library_is_named():
    with pytest.raises(ValueError, match="task 'puzzles' needs reasoning-gym .pip install reasoning-gym."):
        make()


@pytest.mark.skipif(not INSTALLED, reason="reasoning-gym is not installed")
def test_splits_are_deterministic_and_never_meet_and_the_library_judges():
    names = ("leg_counting", "basic_arithmetic")
    task, again = make(datasets=names), make(datasets=names)
    held_out = list(task.evaluation["held_out"])
    assert [e.prompt for e in task.train] == [e.prompt for e in again.train]
    assert len({e.prompt[0]["content"] for e in held_out}) == 6
    assert not {e.prompt[0]["content"] for e in task.train} & {e.prompt[0]["content"] for e in held_out}
    examples = list(task.train[:4])
    right = [f"so <answer>{e.answer}</answer>" for e in examples]
    assert task.score(examples, right) == [1.0] * 4
    assert max(task.score(examples, ["<answer>no idea</answer>"] * 4)) < 0.5
    task.pool.close()


@pytest.mark.skipif(not INSTALLED, reason="reasoning-gym is not installed")
def test_an_unknown_data_set_is_named():
    with pytest.raises(ValueError, match="config.task.puzzles: reasoning-gym's data set 'leg_countin'"):
        make(datasets=("leg_countin",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"datasets": ()}, r"config.task.puzzles.datasets is \(\); it must be at least one name"),
        ({"eval_size": 0}, "config.task.puzzles.eval_size is 0; it must be positive"),
        ({"parameters": {"sudoku": {}}}, "config.task.puzzles.parameters is 'sudoku'; it must be one of"),
    ],
)
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)
