"""Llama-3.2-1B-Instruct on DAPO-Math-17k with the predictive divergence mask; otherwise as configs/qwen3_4b_dapo.py.

    python experiments/train.py --config=configs/llama3_2_1b_dapo.py
    python experiments/plan_pod.py --config=configs/llama3_2_1b_dapo.py --topology=v5e:4x4

Hardware: a TPU slice that experiments/plan_pod.py says it fits. Metric: avg@16 on AIME 2024 and 2025.
"""

from jaxrl_llm.config import files as config_files


def get_config():
    config = config_files.beside(__file__, "qwen3_4b_dapo.py").get_config("meta-llama/Llama-3.2-1B-Instruct")
    config.run_dir = "runs/llama3_2_1b_dapo"
    return config
