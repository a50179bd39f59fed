"""What the four arms configs/tiny_rlhf_{ppo_clip,ppo_or,grpo,grpo_or}.py share; by itself it is the PPO-clip arm.

    python experiments/train_reward_model.py --config=configs/reward_models/tiny.py
    python experiments/train.py --config=configs/tiny_rlhf.py

A small decoder imitates repliers of every quality (warm start), then a frozen reward model judges two replies to each
prompt. As in the "OR Else" paper: G = 2, and a critic with GAE in the PPO family only.

Hardware: 2 CPU cores, 1 to 2 minutes. Metrics: reward/mean (the reward model's, standardised), after/drift,
after/residual, after/overshoot; held-out accuracy is the true rule's score, 1 being the best reply there is.
"""

from jaxrl_llm.config import default_config


def get_config(objective="ppo_clip"):
    config = default_config()
    config.run_dir = f"runs/tiny_rlhf_{objective}"
    config.objective.name = objective

    config.task.name = "procedural_preferences"
    config.reward_model.source = "runs/tiny_reward_model"
    config.model.architecture = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "scan_unroll": 2,
    }
    config.warm_start.steps = 150
    config.warm_start.batch_size = 64
    config.warm_start.learning_rate = 6e-3

    config.rollout.prompts = 32
    config.rollout.group_size = 2
    config.rollout.max_prompt_length = 8
    config.rollout.max_response_length = 8

    # Fields of both terms; each arm reads its own.
    for name in ("ppo_clip", "grpo"):
        config.objective[name].eps_low = config.objective[name].eps_high = 0.2
    for name in ("ppo_or", "grpo_or"):
        config.objective[name].alpha = 0.2
    config.critic.learning_rate = 3e-3
    config.diagnostics.margin = 0.2

    config.training.rollouts = 30
    config.training.updates_per_rollout = 2
    config.training.epochs = 2
    config.optimizer.learning_rate = 1e-3
    config.optimizer.b2 = 0.95

    config.evaluation.every = 0
    config.evaluation.samples = 4
    config.checkpoint.every = 30
    return config
