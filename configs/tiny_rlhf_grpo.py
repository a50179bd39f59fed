"""GRPO: the clipped ratio under group advantages, on the embedded preferences. See configs/tiny_rlhf.py, which all four arms share.

    python experiments/train_reward_model.py --config=configs/reward_models/tiny.py
    python experiments/train.py --config=configs/tiny_rlhf_grpo.py

Hardware: 2 CPU cores, 1 to 2 minutes. Metrics: as in configs/tiny_rlhf.py.
"""

from jaxrl_llm.config import files as config_files


def get_config():
    return config_files.beside(__file__, "tiny_rlhf.py").get_config("grpo")
