"""The whole hh-rlhf pipeline in miniature: its configurations, a chat model, a reward model trained from it, and every arm."""

import pathlib

import numpy as np
import pytest
from rich.console import Console

from jaxrl_llm import schema
from jaxrl_llm.config import RunConfig
from jaxrl_llm.config import files as config_files
from jaxrl_llm.reward_models import reward_model
from jaxrl_llm.training import loop
from tests import tiny
from tests import tiny_runs as runs

pytest.importorskip("torch")

CONFIGS, ROWS = (pathlib.Path(__file__).parents[i] / name for i, name in ((2, "configs"), (1, "data/hh_rlhf.jsonl")))
QUIET = Console(quiet=True)


def shrink(config, source):
    """The configuration with a tiny model in float32, and the sample of the data."""
    config.model.source, config.model.dtype, config.model.remat = str(source), "float32", "none"
    for name in ("train", "evaluation"):
        config.task.preferences[name].path = str(ROWS)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(chat model's directory, reward model's run directory)."""
    folder = tmp_path_factory.mktemp("hh_rlhf")
    turns = "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }}\n{% endfor %}"
    alphabet = "".join(sorted(set(ROWS.read_text(encoding="utf-8"))))
    model = folder / "model"
    tiny.chat(model, alphabet, turns + "{% if add_generation_prompt %}a:{% endif %}", qk_norm=False)
    judge = config_files.load(CONFIGS / "reward_models" / "hh_rlhf.py").get_config()
    shrink(judge, model)
    judge.run_dir = str(folder / "judge")
    judge.update({"max_length": 256, "batch_size": 8, "steps": 30})
    judge.optimizer.update({"learning_rate": 1e-2, "warmup_steps": 0})
    accuracy, _ = reward_model.train(
        schema.read(reward_model.RewardModelConfig, judge.to_dict(), "config"), console=QUIET
    )
    assert (accuracy.value, accuracy.pairs) == (1.0, 3)  # learned by heart
    return model, folder / "judge"


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["ppo_clip", "ppo_or", "grpo", "grpo_or"])
def test_an_arm_runs_and_moves_the_policy(arm, parts, tmp_path):
    config = config_files.load(CONFIGS / f"hh_rlhf_{arm}.py").get_config()
    shrink(config, parts[0])
    config.run_dir, config.reward_model.source = str(tmp_path), str(parts[1])
    config.rollout.update({"prompts": 16, "max_prompt_length": 200, "max_response_length": 8})
    config.training.update({"rollouts": 2, "updates_per_rollout": 2})
    config.evaluation.prompts, config.optimizer.learning_rate = 2, 1e-3
    loop.train(RunConfig.read(config), console=QUIET)
    rows = [row for row in runs.rows(tmp_path) if "reward/mean" in row]
    for name in ("reward/mean", "after/residual", "after/overshoot", "after/drift", "loss", "response/length_mean"):
        assert np.isfinite([row[name] for row in rows]).all(), name
    assert rows[0]["after/drift"] > 0
    assert ("critic/explained_variance" in rows[0]) == arm.startswith("ppo")
