"""PPO-clip: the clipped ratio under GAE, on hh-rlhf. See configs/hh_rlhf.py, which all four arms share.

    python experiments/train_reward_model.py --config=configs/reward_models/hh_rlhf.py
    python experiments/train.py --config=configs/hh_rlhf_ppo_clip.py --config.seed=1

Hardware and metrics: as in configs/hh_rlhf.py.
"""

from jaxrl_llm.config import files as config_files


def get_config():
    return config_files.beside(__file__, "hh_rlhf.py").get_config("ppo_clip")
