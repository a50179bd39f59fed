"""Qwen3.5-35B-A3B (gated delta nets, mixture of experts) on DAPO-Math-17k; otherwise as configs/qwen3_30b_a3b_dapo.py.

    python experiments/train.py --config=configs/qwen3_5_35b_a3b_dapo.py
    python experiments/plan_pod.py --config=configs/qwen3_5_35b_a3b_dapo.py --topology=v5p:4x4x4

Of the published checkpoint the text model is read.

Hardware: a TPU slice that experiments/plan_pod.py says it fits. Metric: avg@16 on AIME 2024 and 2025.
"""

from jaxrl_llm.config import files as config_files


def get_config():
    config = config_files.beside(__file__, "qwen3_30b_a3b_dapo.py").get_config("Qwen/Qwen3.5-35B-A3B")
    config.run_dir = "runs/qwen3_5_35b_a3b_dapo"
    config.mesh.tensor = 2  # as many as heads of keys and values
    return config
