"""The policy of a run directory: the checkpoint's parameters, whatever became of the model that the run began with."""

import json

import jax
import numpy as np
import pytest

from jaxrl_llm import schema, tasks
from jaxrl_llm.api import export, loaded_run
from jaxrl_llm.config import RunConfig, default_config
from jaxrl_llm.hub import hf_config, pretrained
from jaxrl_llm.records.checkpoints import Checkpoints
from tests import tiny

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run from a checkpoint whose tensors can no longer be read; its parameters grew by 1 with every rollout."""
    path = tmp_path_factory.mktemp("run")
    config, _, params = tiny.decoder()
    tokenizer = tasks.create({}).tokenizer.to_transformers()
    pretrained.save(path / "source", params, config, hf_config.to_transformers(config), tokenizer, "float32")
    (path / "source" / "model.safetensors").write_bytes(b"torn")
    run = default_config()
    run.run_dir, run.model.source = str(path), str(path / "source")
    (path / "config.json").write_text(json.dumps(schema.defaults(RunConfig.read(run))))
    with Checkpoints(path / "checkpoints", keep=9) as checkpoints:
        for rollout, accuracy in ((0, 0.1), (1, 0.9), (2, None)):
            state = {"params": jax.tree.map(lambda x, n=rollout: x + n, params), "opt_state": np.zeros(3)}
            checkpoints.save(rollout, state, {}, accuracy)
    return path, params


@pytest.mark.parametrize(
    ("options", "rollout"), [({}, 2), ({"best": True}, 1), ({"rollout": 0}, 0), ({"rollout": 2, "best": True}, 2)]
)
def test_parameters_come_from_the_run_and_not_from_its_source(run_dir, options, rollout):
    path, params = run_dir
    found = loaded_run.load(str(path), **options)
    assert found.rollout == rollout
    jax.tree.map(lambda got, first: np.testing.assert_array_equal(got, first + rollout), found.policy.params, params)
    assert all(x.sharding.mesh.shape["data"] == 8 for x in jax.tree.leaves(found.policy.params))


def test_an_export_is_the_best_checkpoint(run_dir, tmp_path):
    path, params = run_dir
    assert export.export(str(path), str(tmp_path / "out"), dtype="float32") == "the policy after rollout 1"
    exported = pretrained.load(tmp_path / "out", pretrained.read_config(tmp_path / "out"))
    jax.tree.map(lambda got, first: np.testing.assert_array_equal(got, first + 1), exported, params)
