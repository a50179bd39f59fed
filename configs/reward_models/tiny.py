"""A reward model for the embedded preferences, the judge of configs/tiny_rlhf_*.py.

    python experiments/train_reward_model.py --config=configs/reward_models/tiny.py

Hardware: 2 CPU cores, about a minute. Metric: accuracy on held-out pairs, beside that of the rule which made them.
"""

from ml_collections import ConfigDict

from jaxrl_llm import schema
from jaxrl_llm.reward_models.reward_model import RewardModelConfig


def get_config():
    config = ConfigDict(schema.defaults(RewardModelConfig()))
    config.run_dir = "runs/tiny_reward_model"
    config.task.procedural_preferences.eval_size = 1000
    config.model.architecture = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "scan_unroll": 2,
    }
    config.max_length = 16
    config.steps = 1000
    config.batch_size = 64
    config.optimizer.learning_rate = 4e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 20
    return config
