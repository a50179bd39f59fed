"""Trains a policy with reinforcement learning.

    python experiments/train.py --config=configs/quickstart.py
    python experiments/train.py --config=configs/quickstart.py --config.objective.name=drpo --config.run_dir=runs/drpo
    python experiments/train.py --config=configs/quickstart.py --resume
    python experiments/train.py --config=configs/qwen3_4b_dapo.py --distributed   # on every host of a slice, see docs/scale.md

The config file's docstring says what it does and how long it takes. Everything the run leaves is in config.run_dir.
"""

from absl import flags
from ml_collections import config_flags

import jaxrl_llm as jrl
from jaxrl_llm.api import command_line

_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment, a file under configs/.", lock_config=True)
_RESUME = flags.DEFINE_bool("resume", False, "Go on from the run directory's last checkpoint.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace a run that is already in the run directory.")
_PROCESSES = command_line.process_flags()


def main():
    with _PROCESSES():
        jrl.train(_CONFIG.value, resume=_RESUME.value, overwrite=_OVERWRITE.value)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    command_line.run(main)
