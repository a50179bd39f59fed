"""configs/gsm8k.py as it stands, on rows and a model of our own: from chat prompts through the graders to an update."""

import json
import pathlib
import string

import numpy as np
import pytest

from jaxrl_llm.config import files as config_files
from tests import tiny
from tests import tiny_runs as runs

pytest.importorskip("torch")
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def instruct(tmp_path_factory):
    """Directory of a tiny chat model that spells."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    return tiny.chat(tmp_path_factory.mktemp("instruct"), string.printable[:96] + "\n", template, hidden_size=16)


def test_the_shipped_configuration_runs(tmp_path, instruct):
    config = config_files.load(ROOT / "configs" / "gsm8k.py").get_config()
    config.run_dir = str(tmp_path / "run")
    config.model.source = str(instruct)
    config.model.dtype = "float32"  # bfloat16 is emulated on CPU
    for name in ("gsm8k_train", "gsm8k_test"):
        config.task.mathematics.sources[name].path = str(ROOT / "tests" / "data" / f"{name}.jsonl")
    config.task.mathematics.rewards.weights.format = 0.5
    config.rollout.update({"prompts": 2, "group_size": 2, "max_response_length": 4})
    config.training.update({"rollouts": 1, "updates_per_rollout": 2, "micro_batches": 1})
    result, text = runs.run(config)
    row = runs.rows(tmp_path / "run")[-1]
    assert np.isfinite(row["loss"])
    assert row["reward/failed_grades"] == row["data/prompts_too_long"] == 0
    assert "eval/gsm8k_test/accuracy" in row
    (sample, *_) = (json.loads(line) for line in (tmp_path / "run" / "samples" / "after.jsonl").open())
    assert sample["prompt"][0]["content"].endswith("give the final answer in \\boxed{}.")
