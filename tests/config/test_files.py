"""The files under configs/: each one is a configuration that passes every check, and arms of a study differ in one thing."""

import pathlib

import pytest

from jaxrl_llm import schema
from jaxrl_llm.config import RunConfig, check_model
from jaxrl_llm.config import files as config_files
from jaxrl_llm.hub import presets
from jaxrl_llm.plan import programs
from jaxrl_llm.records.checkpoints import config_difference
from jaxrl_llm.reward_models.reward_model import RewardModelConfig

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
RUNS = sorted(CONFIGS.glob("*.py"))


def read(path):
    return RunConfig.read(config_files.load(path).get_config())


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_is_checked_with_its_model_and_named_after_its_file(path):
    run = read(path)
    if path.stem not in ("tiny_rlhf", "hh_rlhf"):  # what arms share is one of them
        assert run.run_dir == f"runs/{path.stem}"
    if run.model.source in presets.PRESETS:
        check_model(run, programs.model_config(run))
    assert f"configs/{path.name}" in config_files.load(path).__doc__


@pytest.mark.parametrize(("name", "study"), [("tiny", "tiny_rlhf"), ("hh_rlhf", "hh_rlhf")])
def test_a_reward_model_is_checked_and_lies_where_the_arms_look_for_it(name, study):
    config = config_files.load(CONFIGS / "reward_models" / f"{name}.py").get_config()
    model = schema.read(RewardModelConfig, config.to_dict(), "config")
    sources = [read(arm).reward_model.source for arm in CONFIGS.glob(f"{study}_*.py")]
    assert sources == [model.run_dir] * 4


@pytest.mark.parametrize("study", ["tiny_rlhf", "hh_rlhf"])
@pytest.mark.parametrize(("clip", "reset"), [("ppo_clip", "ppo_or"), ("grpo", "grpo_or")])
def test_the_arms_of_a_pair_differ_in_the_policy_term_alone(study, clip, reset):
    runs = [read(CONFIGS / f"{study}_{arm}.py") for arm in (clip, reset)]
    difference = config_difference(*map(schema.defaults, runs))
    assert difference == [f"config.objective.name: {clip!r} -> {reset!r}"]
    assert {run.estimator for run in runs} == {"gae" if clip == "ppo_clip" else "group"}
    assert {run.rollout.group_size for run in runs} == {2}
