"""Arithmetic from scratch: supervised warm start, then RL. The project's main job, on a laptop.

    python experiments/train.py --config=configs/quickstart.py
    python experiments/train.py --config=configs/quickstart.py --config.objective.name=drpo --config.run_dir=runs/drpo

Hardware: 2 CPU cores. Metric: accuracy on 512 held-out prompts.
"""

from jaxrl_llm.training.config import default_config


def get_config():
    config = default_config()
    config.run_dir = "runs/quickstart"

    config.task.name = "arithmetic"
    config.task.arithmetic.kinds = ("sum4", "mix3", "mix4")
    config.model.architecture = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
    }
    config.warm_start.steps = 300
    config.warm_start.batch_size = 128
    config.warm_start.learning_rate = 4e-3

    config.rollout.prompts = 64
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 16
    config.rollout.max_response_length = 4
    config.rollout.capture_top_k = 8

    config.objective.name = "pdm"
    config.training.rollouts = 100
    config.training.updates_per_rollout = 4
    config.optimizer.learning_rate = 2e-4
    config.optimizer.warmup_steps = 10

    config.evaluation.every = 20
    config.checkpoint.every = 60
    return config
