"""A reward model for Anthropic/hh-rlhf, the judge of configs/hh_rlhf_*.py: Llama-3.2-1B-Instruct with a score head, one epoch.

    python experiments/train_reward_model.py --config=configs/reward_models/hh_rlhf.py

Hardware: a TPU slice or GPU node; batch_size must be a multiple of its devices. Metric: accuracy on held-out pairs.
"""

from ml_collections import ConfigDict

from jaxrl_llm import schema
from jaxrl_llm.reward_models.reward_model import RewardModelConfig


def get_config():
    config = ConfigDict(schema.defaults(RewardModelConfig()))
    config.run_dir = "runs/hh_rlhf_reward_model"
    config.model.source = "meta-llama/Llama-3.2-1B-Instruct"
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.task.name = "preferences"
    config.task.preferences.malformed = "skip"
    config.max_length = 768
    config.batch_size = 64
    config.steps = 2500  # of about 160,000 pairs
    config.evaluation_pairs = 4096
    config.optimizer.learning_rate = 1e-5
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 100
    config.mesh.data = 1
    config.mesh.fsdp = -1
    return config
