"""Qwen3-30B-A3B (mixture of experts) on DAPO-Math-17k; otherwise as configs/qwen3_4b_dapo.py.

    python experiments/train.py --config=configs/qwen3_30b_a3b_dapo.py
    python experiments/plan_pod.py --config=configs/qwen3_30b_a3b_dapo.py --topology=v5p:4x4x4

The trainer replays the experts that the sampler chose.

Hardware: a TPU slice that experiments/plan_pod.py says it fits. Metric: avg@16 on AIME 2024 and 2025.
"""

from jaxrl_llm.config import files as config_files


def get_config(source="Qwen/Qwen3-30B-A3B"):
    config = config_files.beside(__file__, "qwen3_4b_dapo.py").get_config(source)
    config.run_dir = "runs/qwen3_30b_a3b_dapo"
    config.rollout.routing_replay = True
    config.training.micro_batches = 2
    # The sampler's copy, whole along fsdp, fits in quarters; there are no more than 4 heads of keys.
    config.mesh.tensor = 4
    return config
