"""A mistyped field is answered with the one that was meant, wherever it stands."""

import pytest

from jaxrl_llm.config import RunConfig, default_config, suggest


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("config.training.staleness", "config.rollout.staleness"),
        ("config.staleness", "config.rollout.staleness"),
        ("config.objective.nam", "config.objective.name"),
        ("config.rollout.capture_topk", "config.rollout.capture_top_k"),
        ("config.task.arithmetic.kind", "config.task.arithmetic.kinds"),
        ("config.learning_rate", "config.optimizer.learning_rate"),
        ("config.roll_out.prompts", "config.rollout.prompts"),
    ],
)
def test_the_field_that_was_meant_is_among_the_suggestions(path, meant):
    found = suggest.closest(path, list(suggest.paths(default_config())))
    assert meant in found and len(found) <= suggest.SUGGESTIONS
    if path == "config.training.staleness":
        assert found[0] == meant


def test_nothing_is_suggested_for_what_resembles_nothing():
    text = suggest.unknown_field("config.mesh.zzzzzz", default_config())
    assert "did you mean" not in text and text.endswith("config.mesh has: data, expert, fsdp, sequence, tensor")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"training": {"staleness": 1}},
            r"config\.training\.staleness; did you mean config\.rollout\.staleness.*config\.training has: ",
        ),
        ({"objective": {"nam": "pdm"}}, r"config\.objective\.nam; did you mean config\.objective\.name"),
        ({"objective": {"name": "drpoo"}}, "did you mean 'drpo'"),
        ({"model": {"dtype": "float23"}}, r"config\.model\.dtype is 'float23'.*did you mean 'float32'"),
        ({"rollout": {"prompts": True}}, r"config\.rollout\.prompts is True"),
    ],
)
def test_a_configuration_from_python_is_answered_alike(config, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.read(config)
