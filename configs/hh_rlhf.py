"""What the four arms configs/hh_rlhf_{ppo_clip,ppo_or,grpo,grpo_or}.py share; by itself it is the PPO-clip arm.

    python experiments/train_reward_model.py --config=configs/reward_models/hh_rlhf.py
    python experiments/train.py --config=configs/hh_rlhf.py --config.seed=1

The setting of the "OR Else" paper: Llama-3.2-1B-Instruct, Anthropic/hh-rlhf, one frozen reward model for all arms, three seeds
(--config.seed=1, 2, 3), a value head and GAE in the PPO family, groups of two in the other. The paper names neither its reward
model nor alpha, lengths, batch and learning rate: those below are this project's choice. Any other reward model may be put in
its place: --config.reward_model.source=Skywork/Skywork-Reward-V2-Llama-3.2-1B

Hardware: policy and critic of 1.2 billion parameters with their moments, in float32, and the reward model make 35 GB over the
devices of the mesh (20 GB without a critic), activations and cache apart. Metrics: reward/mean (standardised), after/drift,
after/residual, after/overshoot, response length. eval/held_out/accuracy is the mean standardised score of held-out replies
here, not a share of right answers, and so is what the program prints as accuracy.
"""

from jaxrl_llm.config import default_config


def get_config(objective="ppo_clip"):
    config = default_config()
    config.run_dir = f"runs/hh_rlhf_{objective}"
    config.objective.name = objective

    config.model.source = "meta-llama/Llama-3.2-1B-Instruct"
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.task.name = "preferences"
    config.task.preferences.malformed = "skip"
    config.reward_model.source = "runs/hh_rlhf_reward_model"
    config.reward_model.batch_size = 64

    config.rollout.prompts = 128
    config.rollout.group_size = 2
    config.rollout.max_prompt_length = 512
    config.rollout.max_response_length = 256

    # Fields of both terms; each arm reads its own.
    for name in ("ppo_clip", "grpo"):
        config.objective[name].eps_low = config.objective[name].eps_high = 0.2
    for name in ("ppo_or", "grpo_or"):
        config.objective[name].alpha = 0.2
    config.critic.learning_rate = 1e-5
    config.diagnostics.margin = 0.2

    config.training.rollouts = 200
    config.training.updates_per_rollout = 4
    config.optimizer.learning_rate = 1e-6
    config.optimizer.b2 = 0.95

    config.evaluation.every = 20
    config.evaluation.prompts = 512
    config.checkpoint.every = 20

    config.mesh.data = 1
    config.mesh.fsdp = -1
    return config
