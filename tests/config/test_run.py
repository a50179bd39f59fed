"""Configurations are refused before anything compiles, by field and with what would be right."""

import pytest

from jaxrl_llm.config import RunConfig, check_devices, check_model, default_config
from jaxrl_llm.models.config import ModelConfig, MoEConfig


def test_the_defaults_are_a_valid_configuration_and_survive_the_round_trip():
    run = RunConfig.read(default_config())
    assert run == RunConfig.read(run.__dict__)
    assert run.optimizer_steps == 400


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        (
            "rollout",
            "temprature",
            1.0,
            "unknown field config.rollout.temprature; did you mean config.rollout.temperature",
        ),
        (
            "rollout",
            "temperature",
            0.0,
            "config.rollout.temperature is 0.0; it must be above 0: a greedy sampler has no importance",
        ),
        ("rollout", "capture_top_k", True, "config.rollout.capture_top_k is True; it must be an integer"),
        ("rollout", "top_p", 0.0, r"config.rollout.top_p is 0.0; it must be in \(0, 1\]"),
        ("rollout", "prompts", "many", "config.rollout.prompts is 'many'"),
        ("rollout", "group_size", 0, "config.rollout.group_size is 0; it must be positive"),
        (
            "training",
            "updates_per_rollout",
            7,
            "config.training.updates_per_rollout is 7; it must be a divisor of the 256",
        ),
        (
            "training",
            "micro_batches",
            5,
            "config.training.micro_batches is 5; it must be a divisor of the mini-batch's 64",
        ),
        (
            "objective",
            "name",
            "grop",
            "unknown objective config.objective.name 'grop'; choose from: .*pdm.*; did you mean 'grpo'",
        ),
        ("objective", "name", "dppo", "config.rollout.capture_top_k is 0; it must be positive: objective 'dppo'"),
        (
            "optimizer",
            "schedule",
            "cos",
            "config.optimizer.schedule is 'cos'; choose from: 'constant', 'linear', 'cosine'",
        ),
        ("advantage", "name", "gea", "config.advantage.name is 'gea'; choose from"),
        (
            "model",
            "dtype",
            "float16",
            "config.model.dtype is 'float16'; choose from: 'float32', 'bfloat16'",
        ),
    ],
)
def test_a_wrong_field_is_named(section, field, value, message):
    config = default_config().to_dict()
    config[section][field] = value
    with pytest.raises(ValueError, match=message):
        RunConfig.read(config)


def test_an_unknown_section_is_named():
    with pytest.raises(ValueError, match="unknown field config.sampler; .*config has: .*rollout"):
        RunConfig.read(default_config().to_dict() | {"sampler": {}})


def test_k_above_the_vocabulary_is_refused():
    config = default_config().to_dict()
    config["rollout"]["capture_top_k"] = 65
    with pytest.raises(
        ValueError, match="config.rollout.capture_top_k is 65; it must be at most the vocabulary's size, 64"
    ):
        check_model(RunConfig.read(config), ModelConfig(vocab_size=64))


def test_routing_replay_without_experts_is_refused():
    config = default_config().to_dict()
    config["rollout"]["routing_replay"] = True
    with pytest.raises(ValueError, match="config.rollout.routing_replay is True; it must be False: the model has no"):
        check_model(RunConfig.read(config), ModelConfig())
    check_model(RunConfig.read(config), ModelConfig(moe=MoEConfig(4, 2)))


def test_a_batch_that_does_not_divide_over_the_mesh_is_refused():
    run = RunConfig.read(default_config())
    check_devices(run, 8)
    with pytest.raises(
        ValueError, match="config.training.micro_batches is 1; it must be such that .*64 sequences.*3 devices"
    ):
        check_devices(run, 3)
