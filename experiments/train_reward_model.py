"""Trains a reward model on comparisons of replies (Bradley-Terry) and measures it on held-out pairs.

    python experiments/train_reward_model.py --config=configs/reward_models/tiny.py

What it leaves in config.run_dir is what `config.reward_model.source` of experiments/train.py takes.
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from jaxrl_llm import schema
from jaxrl_llm.training import reward_model
from jaxrl_llm.training.checkpoint import SaveError

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file under configs/reward_models/.", lock_config=True)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace a run that is already in the run directory.")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    try:
        run = schema.read(reward_model.RewardModelConfig, _CONFIG.value.to_dict(), "config")
        reward_model.train(run, overwrite=_OVERWRITE.value)
    except (ValueError, SaveError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
