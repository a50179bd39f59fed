"""Qwen3-4B on DAPO-Math-17k with the predictive divergence mask, in the setting of the PDM paper (arXiv 2607.10848).

    python experiments/train.py --config=configs/qwen3_4b_dapo.py
    python experiments/plan_pod.py --config=configs/qwen3_4b_dapo.py --topology=v5p:4x4x4

512 samples a rollout, up to 8,192 response tokens, 4 updates, K = 20, delta = 0.15 (0.05 in the paper's tight study).

Hardware: a TPU slice that experiments/plan_pod.py says it fits. Metric: avg@16 on AIME 2024 and 2025.
"""

from jaxrl_llm.config import default_config


def get_config(source="Qwen/Qwen3-4B"):
    config = default_config()
    config.run_dir = "runs/qwen3_4b_dapo"
    config.model.source = source
    config.model.dtype = "bfloat16"
    config.model.remat = "full"

    config.task.name = "mathematics"
    config.task.mathematics.train = "dapo_math_17k"
    config.task.mathematics.evaluation = ("aime24", "aime25")

    config.rollout.prompts = 64
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 1024
    config.rollout.max_response_length = 8192
    config.rollout.capture_top_k = 20

    config.objective.name = "pdm"
    config.objective.pdm.view = "topk_aggregated"
    config.objective.pdm.delta_low = 0.15
    config.objective.pdm.delta_high = 0.15
    config.training.rollouts = 300
    config.training.updates_per_rollout = 4
    config.training.packing = True
    config.optimizer.learning_rate = 1e-6
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.01

    config.evaluation.every = 20
    config.evaluation.samples = 16
    config.evaluation.temperature = 0.7
    config.evaluation.top_p = 0.95
    config.checkpoint.every = 10

    config.mesh.data = 1
    config.mesh.fsdp = -1
    return config
