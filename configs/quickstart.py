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
    config.task.arithmetic.kinds = ("sum3", "mix3", "mix4")
    # Most of the teacher's demonstrations are guesses. Imitation is as hasty as the teacher; RL finds out that working
    # the answer out pays.
    config.task.arithmetic.guessed_demonstrations = 0.5
    config.model.architecture = {
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_layers": 2,
        "scan_unroll": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
    }
    config.warm_start.steps = 400
    config.warm_start.batch_size = 128
    config.warm_start.learning_rate = 6e-3

    config.rollout.prompts = 64
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 16
    config.rollout.max_response_length = 12
    config.rollout.capture_top_k = 8

    config.objective.name = "pdm"
    config.training.rollouts = 60
    config.training.updates_per_rollout = 4
    config.optimizer.learning_rate = 5e-4
    config.optimizer.warmup_steps = 10
    config.optimizer.b2 = 0.95

    config.evaluation.every = 20
    config.checkpoint.every = 60
    return config
