"""Trains a reward model on comparisons of replies (Bradley-Terry) and measures it on held-out pairs.

    python experiments/train_reward_model.py --config=configs/reward_models/tiny.py

What it leaves in config.run_dir is what `config.reward_model.source` of experiments/train.py takes.
"""

from absl import flags
from ml_collections import config_flags

from jaxrl_llm import schema
from jaxrl_llm.api import command_line
from jaxrl_llm.reward_models import reward_model

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file under configs/reward_models/.", lock_config=True)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace a run that is already in the run directory.")
_PROCESSES = command_line.process_flags()


def main():
    with _PROCESSES():
        run = schema.read(reward_model.RewardModelConfig, _CONFIG.value.to_dict(), "config")
        reward_model.train(run, overwrite=_OVERWRITE.value)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    command_line.run(main)
