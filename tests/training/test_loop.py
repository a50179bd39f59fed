"""Whole runs in miniature: everything a run leaves, and that stopping and resuming changes nothing."""

import importlib.util
import io
import json
import os
import pathlib
import signal
import threading

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxrl_llm.objectives import OBJECTIVES
from jaxrl_llm.tasks import arithmetic
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import RunConfig, default_config

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def rewards_that_differ(monkeypatch):
    """An untrained policy earns nothing, and then nothing is learned either: reward the parity of the length instead."""

    def score(self, examples, completions, lengths, truncated):
        return [float(len(c) % 2) for c in completions]

    monkeypatch.setattr(arithmetic.ArithmeticTask, "score", score)


def tiny_config(path, **training):
    config = default_config()
    config.run_dir = str(path)
    config.task.arithmetic.kinds = ("sum3",)
    config.task.arithmetic.eval_size = 8
    config.model.architecture = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "head_dim": 8,
    }
    config.rollout.update({"prompts": 8, "group_size": 2, "max_response_length": 8, "capture_top_k": 3})
    config.objective.name = "pdm"
    config.training.update({"rollouts": 4, "updates_per_rollout": 2} | training)
    config.warm_start.update({"steps": 3, "batch_size": 8})
    config.evaluation.every = 2
    config.checkpoint.every = 2
    config.optimizer.learning_rate = 1e-3
    return config


def run(config, **options):
    text = io.StringIO()
    result = loop.train(RunConfig.read(config), console=Console(file=text, width=200), **options)
    return result, text.getvalue()


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def without_time(row):
    return {k: v for k, v in row.items() if not k.startswith("time/")}


def test_a_run_leaves_everything_it_promises(tmp_path):
    result, text = run(tiny_config(tmp_path / "run"))
    folder = tmp_path / "run"
    assert [row["rollout"] for row in rows(folder)] == [0, 1, 2, 3, 4]
    last = rows(folder)[-1]
    for name in (
        "reward/mean",
        "entropy",
        "mask/share",
        "divergence/mean",
        "mismatch/mean_abs_log_ratio",
        "eval/held_out/accuracy",
    ):
        assert np.isfinite(last[name]), name
    assert last["mismatch/mean_abs_log_ratio"] < 1e-4
    assert json.loads((folder / "config.json").read_text())["objective"]["name"] == "pdm"
    for file in ("plots/training.png", "samples/before.md", "samples/after.md", "samples/after.jsonl"):
        assert (folder / file).stat().st_size > 0, file
    assert list((folder / "tensorboard").iterdir())
    assert (folder / "checkpoints" / "4").is_dir()
    assert "held-out accuracy after RL" in text
    assert 0 <= result.after.low <= result.after.accuracy <= result.after.high <= 1


def test_resuming_repeats_what_an_uninterrupted_run_would_have_done(tmp_path):
    run(tiny_config(tmp_path / "whole"))

    class Interrupt(Console):
        """Sends SIGTERM while the second rollout is under way."""

        sent = False

        def print(self, *objects, **options):
            super().print(*objects, **options)
            if not self.sent and "before RL" in str(objects[0] if objects else ""):
                Interrupt.sent = True
                threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

    config = tiny_config(tmp_path / "parts")
    text = io.StringIO()
    assert loop.train(RunConfig.read(config), console=Interrupt(file=text, width=200)) is None
    assert "go on with --resume" in text.getvalue()
    stopped = len(rows(tmp_path / "parts"))
    assert stopped < 5
    run(config, resume=True)
    assert [without_time(r) for r in rows(tmp_path / "parts")] == [without_time(r) for r in rows(tmp_path / "whole")]


def test_a_run_that_is_there_is_kept_and_a_changed_configuration_shown_and_refused(tmp_path):
    config = tiny_config(tmp_path / "run", rollouts=1)
    run(config)
    with pytest.raises(ValueError, match="--resume to go on, --overwrite"):
        run(config)
    config.training.rollouts = 2
    config.objective.pdm.delta_low = 0.3
    with pytest.raises(ValueError, match=r"(?s)differs from the checkpoint's.*pdm.delta_low: 0.15 -> 0.3"):
        run(config, resume=True)
    config.checkpoint.allow_config_change = True
    run(config, resume=True)
    assert rows(tmp_path / "run")[-1]["rollout"] == 2


@pytest.mark.parametrize("name", ["drpo", "grpo_or"])
def test_every_family_trains_by_its_name_alone(tmp_path, name):
    config = tiny_config(tmp_path / name, rollouts=1)
    config.objective.name = name
    run(config)
    assert np.isfinite(rows(tmp_path / name)[-1]["loss"])
    assert name in OBJECTIVES


def test_fp8_in_the_sampler_alone_shows_as_mismatch_and_end_to_end_reduces_it(tmp_path):
    gaps = {}
    for scope in ("rollout_only", "end_to_end"):
        config = tiny_config(tmp_path / scope, rollouts=1)
        config.rollout.fp8.update({"scope": scope, "weights": "e4m3", "activations": "e4m3"})
        run(config)
        gaps[scope] = rows(tmp_path / scope)[-1]["mismatch/mean_abs_log_ratio"]
    assert gaps["rollout_only"] > 1e-4
    assert gaps["end_to_end"] < gaps["rollout_only"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_every_shipped_configuration_is_valid(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert RunConfig.read(module.get_config())
    assert "experiments/train.py" in module.__doc__


def test_eight_devices_train_like_one(tmp_path):
    """The mesh changes where numbers live, not what they are (float32 sums in another order)."""
    assert len(jax.devices()) == 8
    results = []
    for mesh in ({"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}):
        config = tiny_config(tmp_path / str(len(results)), rollouts=1)
        config.mesh.update(mesh)
        run(config)
        results.append(rows(tmp_path / str(len(results)))[-1])
    for other in results[1:]:
        assert other["reward/mean"] == results[0]["reward/mean"]
        np.testing.assert_allclose(other["loss"], results[0]["loss"], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(other["optimizer/grad_norm"], results[0]["optimizer/grad_norm"], rtol=1e-3)
