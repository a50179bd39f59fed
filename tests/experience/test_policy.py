"""A run's policy from a checkpoint: loaded, described without reading it, and refused before anything compiles."""

import json

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.config import Mesh, RunConfig, default_config
from jaxrl_llm.experience import policy as policies
from jaxrl_llm.hub import hf_config, pretrained
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.tasks.tokenizer import CharTokenizer
from tests import tiny

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(directory, parameters) of a small exported model with the arithmetic task's tokenizer and two end ids."""
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    config, _, params = tiny.decoder()
    theirs = hf_config.to_transformers(config)
    theirs.eos_token_id = [2, 5]
    pretrained.save(path, params, config, theirs, tasks.create({}).tokenizer.to_transformers(), "float32")
    return path, params


def run(**model):
    config = default_config()
    config.model.update(model)
    return RunConfig.read(config)


class Chat:
    """A task that takes the checkpoint's tokenizer."""

    name, tokenizer = "chat", None


def test_parameters_tokenizer_and_end_ids_come_from_the_checkpoint(checkpoint):
    path, params = checkpoint
    policy = policies.create(run(source=str(path)), Chat(), sharding.create_mesh(Mesh()))
    assert policy.config == ModelConfig(
        vocab_size=19, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    assert (policy.stop_ids, policy.pad_id) == ((2, 5), 0)
    ours = tasks.create({}).tokenizer
    assert policy.tokenizer.encode("12+3=") == ours.encode("12+3=")
    assert policy.tokenizer.decode([4, 13, 5], skip_special_tokens=True) == ours.decode([4, 13, 5])
    for name, array in pretrained.flatten(params).items():
        np.testing.assert_array_equal(pretrained.flatten(policy.params)[name], array, err_msg=str(name))


def test_what_does_not_fit_is_refused(checkpoint):
    path = str(checkpoint[0])
    task = tasks.create({})
    with pytest.raises(ValueError, match="model.architecture.hidden_size is 8; it must be left out"):
        policies.describe(run(source=path, architecture={"hidden_size": 8}), task)
    with pytest.raises(ValueError, match="config.model.source is empty; task 'chat' takes its tokenizer"):
        policies.describe(run(), Chat())
    with pytest.raises(ValueError, match="is no directory"):
        policies.describe(run(source="/nowhere"), Chat())
    other = type("Other", (), {"name": "other", "tokenizer": CharTokenizer("ab")})
    with pytest.raises(ValueError, match="config.model.source is .*the task's own tokenizer, 5 ids"):
        policies.describe(run(source=path), other())


def test_a_tokenizer_larger_than_the_model_is_refused(checkpoint, tmp_path):
    config = json.loads((checkpoint[0] / "config.json").read_text())
    for file in checkpoint[0].iterdir():
        (tmp_path / file.name).symlink_to(file) if file.name != "config.json" else None
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    with pytest.raises(ValueError, match="vocab_size of .* is 7; it must be at least the tokenizer's 19"):
        policies.describe(run(source=str(tmp_path)), Chat())
