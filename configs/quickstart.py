"""Arithmetic from scratch: a supervised warm start, then RL. The project's main job, on a laptop.

    python experiments/train.py --config=configs/quickstart.py
    python experiments/train.py --config=configs/quickstart.py --config.objective.name=drpo --config.run_dir=runs/drpo

The teacher of the warm start works two answers in five out and guesses the rest, so a policy that imitates it is right about
half of the time. RL, which only sees right and wrong, finds out that working the answer out pays.

Hardware: 2 CPU cores, a few minutes. Metric: accuracy at temperature 1 on held-out prompts.
"""

from jaxrl_llm.config import default_config


def get_config():
    config = default_config()
    config.run_dir = "runs/quickstart"

    config.task.name = "arithmetic"
    config.task.arithmetic.kinds = ("sum3", "mix3")
    config.task.arithmetic.guessed_demonstrations = 0.6
    config.task.arithmetic.eval_size = 180  # one-digit sums have few different held-out prompts
    config.model.architecture = {
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_layers": 2,
        "scan_unroll": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
    }
    config.warm_start.steps = 700
    config.warm_start.batch_size = 128
    config.warm_start.learning_rate = 6e-3

    config.rollout.prompts = 64
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 16
    config.rollout.max_response_length = 8
    config.rollout.capture_top_k = 8

    config.objective.name = "pdm"
    config.training.rollouts = 60
    config.training.updates_per_rollout = 4
    config.optimizer.learning_rate = 5e-4
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 10
    config.optimizer.b2 = 0.95

    config.evaluation.every = 10
    config.evaluation.samples = 4
    config.checkpoint.every = 30
    return config
