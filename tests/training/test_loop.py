"""Whole runs in miniature: everything a run leaves, and that stopping and resuming changes nothing."""

import io
import json
import pathlib
import re
import resource
import shutil
from unittest import mock

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxrl_llm import schema
from jaxrl_llm.config import RunConfig
from jaxrl_llm.config import files as config_files
from jaxrl_llm.objectives import OBJECTIVES
from jaxrl_llm.records.checkpoints import Checkpoints, SaveError
from jaxrl_llm.reward_models import reward_model
from tests import tiny_runs as tiny

ROOT = pathlib.Path(__file__).parents[2]
# The runs below are used by several tests each.
pytestmark = pytest.mark.xdist_group("loop")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run with everything on: what it returned, what it said, and where it is."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    config = tiny.config(folder, training__autopsy_delta=1e-9, diagnostics__margin=0.2)
    return *tiny.run(config), folder


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Plain runs by the name of an objective alone, in FP8: in the sampler alone, and in the trainer too."""
    folder = tmp_path_factory.mktemp("families")
    scopes = {"drpo": "rollout_only", "grpo_or": "end_to_end"}
    for name, scope in scopes.items():
        config = tiny.config(folder / name, **tiny.PLAIN, objective__name=name, evaluation__every=0)
        config.rollout.fp8.update({"scope": scope, "weights": "e4m3", "activations": "e4m3"})
        tiny.run(config)
    return {name: folder / name for name in scopes}


@pytest.fixture(scope="module")
def actor_critic(tmp_path_factory):
    """A mixture of experts with a critic, and the KL in its reward, over a mesh that divides rows and parameters."""
    folder = tmp_path_factory.mktemp("critic") / "run"
    config = tiny.config(folder, **tiny.PLAIN, objective__name="ppo_or", kl__reward=0.05, evaluation__every=0)
    config.model.architecture.moe = {"num_experts": 4, "experts_per_token": 2, "intermediate_size": 8}
    config.rollout.routing_replay = True
    config.mesh.update({"data": 4, "fsdp": 2})
    tiny.run(config, devices=8)
    return folder


def test_a_run_leaves_everything_it_promises(whole):
    result, text, folder = whole
    rows = tiny.rows(folder)
    assert [row["rollout"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(np.isfinite(value) for row in rows for value in row.values() if value is not None)
    assert rows[1]["mismatch/mean_abs_log_ratio"] < 1e-4
    assert json.loads((folder / "config.json").read_text())["objective"]["name"] == "pdm"
    for file in ("plots/training.png", "samples/before.md", "samples/after.md", "samples/after.jsonl"):
        assert (folder / file).stat().st_size > 0, file
    assert list((folder / "tensorboard").iterdir())
    assert (folder / "checkpoints" / "4").is_dir()
    assert "held-out accuracy after RL" in text
    assert 0 <= result.after.low <= result.after.accuracy <= result.after.high <= 1


def test_resuming_repeats_what_an_uninterrupted_run_would_have_done(tmp_path, whole):
    config = tiny.config(tmp_path / "parts", training__autopsy_delta=1e-9, diagnostics__margin=0.2)
    result, text = tiny.run(config, console=tiny.interrupt())
    assert result is None
    assert "go on with --resume" in text
    assert len(tiny.rows(tmp_path / "parts")) < 5
    tiny.run(config, resume=True)
    assert tiny.rows(tmp_path / "parts") == tiny.rows(whole[-1])
    tiny.same_arrays(*(tiny.arrays(folder, 4) for folder in (tmp_path / "parts", whole[-1])))


def test_a_run_that_is_there_is_kept_and_a_changed_configuration_shown_and_refused(tmp_path, whole):
    shutil.copytree(whole[-1], tmp_path / "run")
    config = tiny.config(tmp_path / "run", training__autopsy_delta=1e-9, diagnostics__margin=0.2)
    with pytest.raises(ValueError, match="--resume to go on, --overwrite"):
        tiny.run(config)
    config.training.rollouts = 5
    config.objective.pdm.delta_low = 0.3
    with pytest.raises(ValueError, match=r"(?s)differs from the checkpoint's.*pdm.delta_low: 0.15 -> 0.3"):
        tiny.run(config, resume=True)
    config.checkpoint.allow_config_change = True
    config.objective.pdm.delta_low = 0.15  # spares a compilation; the number of rollouts has changed as well
    tiny.run(config, resume=True)
    assert tiny.rows(tmp_path / "run")[-1]["rollout"] == 5


def test_every_family_trains_by_its_name_alone(families):
    for name, folder in families.items():
        assert np.isfinite(tiny.rows(folder)[-1]["loss"])
        assert name in OBJECTIVES


def test_fp8_in_the_sampler_alone_shows_as_mismatch_and_end_to_end_reduces_it(families):
    # It is measured before the first update, so the objective has no part in it.
    alone, both = (tiny.rows(families[name])[-1]["mismatch/mean_abs_log_ratio"] for name in ("drpo", "grpo_or"))
    assert alone > 1e-4
    assert both < alone


def test_a_critic_and_experts_learn_together(actor_critic):
    row = tiny.rows(actor_critic)[-1]
    assert np.isfinite([row["loss"], row["critic/loss"], row["critic/grad_norm"]]).all()
    assert row["critic/grad_norm"] > 0
    assert 1 <= row["router/max_load"] <= 2  # the even share, and all that E / k = 2 allows


def test_the_mesh_changes_where_numbers_live_not_what_they_are(tmp_path):
    """Float32 sums come in another order."""
    assert len(jax.devices()) == 8
    one, other = tmp_path / "one", tmp_path / "eight"
    tiny.run(tiny.config(one, **tiny.PLAIN, evaluation__every=0))
    config = tiny.config(other, **tiny.PLAIN, evaluation__every=0)
    config.mesh.update({"data": 2, "fsdp": 2, "tensor": 2})
    tiny.run(config, devices=8)
    one, other = tiny.rows(one)[-1], tiny.rows(other)[-1]
    assert other["reward/mean"] == one["reward/mean"]
    np.testing.assert_allclose(other["loss"], one["loss"], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(other["optimizer/grad_norm"], one["optimizer/grad_norm"], rtol=1e-3)


def test_every_metric_has_its_line_in_the_documentation(tmp_path, whole, families, actor_critic):
    judge = config_files.load(ROOT / "configs" / "reward_models" / "tiny.py").get_config()
    judge.update({"run_dir": str(tmp_path / "judge"), "steps": 1, "evaluation_pairs": 16})
    judge = schema.read(reward_model.RewardModelConfig, judge.to_dict(), "config")
    reward_model.train(judge, console=Console(file=io.StringIO()))
    folders = [whole[-1], *families.values(), actor_critic, tmp_path / "judge"]
    written = {name for folder in folders for name in tiny.names(folder)}
    written = {name.replace("eval/held_out/", "eval/SET/") for name in written}
    page = (ROOT / "docs" / "metrics.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall("`([^`]+)`", cell)]
    assert written - set(named) == set(), "metrics without a line in docs/metrics.md"
    assert set(named) - written == set(), "lines of docs/metrics.md about metrics that no run writes"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_the_run_with_one_error_and_costs_no_earlier_checkpoint(tmp_path):
    """A limit on the size of files stands in for the disk: it fails the same write."""
    config = tiny.config(tmp_path / "run", **tiny.PLAIN | {"training__rollouts": 2}, evaluation__every=0)
    save, (soft, hard) = Checkpoints.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_on_a_full_disk(self, rollout, *rest):
        if rollout == 2:
            self.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        save(self, rollout, *rest)

    try:
        with (
            mock.patch.object(Checkpoints, "save", save_on_a_full_disk),
            pytest.raises(SaveError, match=r"could not be written to .*/checkpoints: .*; whole ones there: 0, 1$"),
        ):
            tiny.run(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _, text = tiny.run(config, resume=True)
    assert "resuming after rollout 1 of 2" in text
    assert [row["rollout"] for row in tiny.rows(tmp_path / "run")] == [0, 1, 2]
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()


def test_a_warm_start_without_worked_solutions_is_refused(tmp_path):
    config = tiny.config(tmp_path / "run")
    config.task.name = "mathematics"
    config.task.mathematics.update({"train": "own_train", "evaluation": ("aime24",)})
    for name, file in (("own_train", "aime25"), ("aime24", "aime24")):
        config.task.mathematics.sources[name].path = str(ROOT / "tests" / "data" / f"{file}.jsonl")
    message = "config.warm_start.steps is 3; it must be 0: task 'mathematics' has examples without a worked solution"
    with pytest.raises(ValueError, match=message):
        tiny.run(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_every_shipped_configuration_is_valid(path):
    module = config_files.load(path)
    assert RunConfig.read(module.get_config())
    assert "experiments/train.py" in module.__doc__
