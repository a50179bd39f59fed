"""Qwen3-8B on DAPO-Math-17k with the predictive divergence mask; otherwise as configs/qwen3_4b_dapo.py.

    python experiments/train.py --config=configs/qwen3_8b_dapo.py
    python experiments/plan_pod.py --config=configs/qwen3_8b_dapo.py --topology=v5p:4x4x4

Hardware: a TPU slice that experiments/plan_pod.py says it fits. Metric: avg@16 on AIME 2024 and 2025.
"""

from jaxrl_llm.config import files as config_files


def get_config():
    config = config_files.beside(__file__, "qwen3_4b_dapo.py").get_config("Qwen/Qwen3-8B")
    config.run_dir = "runs/qwen3_8b_dapo"
    return config
