"""GRPO-OR: the output-reset margin under group advantages, on embedded preferences. configs/tiny_rlhf.py says the rest.

    python experiments/train_reward_model.py --config=configs/reward_models/tiny.py
    python experiments/train.py --config=configs/tiny_rlhf_grpo_or.py

Hardware: 2 CPU cores, 1 to 2 minutes. Metrics: as in configs/tiny_rlhf.py.
"""

import importlib.util
import pathlib


def get_config():
    path = pathlib.Path(__file__).with_name("tiny_rlhf.py")
    spec = importlib.util.spec_from_file_location("tiny_rlhf", path)
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    return shared.get_config("grpo_or")
