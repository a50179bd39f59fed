"""Which direction criterion is right? Trains as train.py does, and looks at every update what it really did.

    python experiments/autopsy.py --config=configs/quickstart_fp8.py --config.run_dir=runs/autopsy --config.training.rollouts=20

Around every optimizer step, tokens whose divergence exceeds config.training.autopsy_delta (0.15 unless set) get the verdicts of
the ratio and of the predictive criterion, and their divergence is measured again after the step. The rates are in the run's
metrics under autopsy/; the table at the end pools them and sets them beside the paper's.
"""

from absl import flags
from ml_collections import config_flags
from rich.console import Console
from rich.table import Table

from jaxrl_llm.analysis import autopsy
from jaxrl_llm.api import command_line
from jaxrl_llm.config import RunConfig
from jaxrl_llm.records.metrics import read_rows
from jaxrl_llm.training import loop

_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment, a file under configs/.", lock_config=True)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace a run that is already in the run directory.")


def main():
    config = _CONFIG.value
    config.training.autopsy_delta = config.training.autopsy_delta or 0.15
    result = loop.train(RunConfig.read(config), overwrite=_OVERWRITE.value)
    if result is not None:
        show(autopsy.pool(read_rows(result.run_dir.metrics)), config.training.autopsy_delta)


def show(rates: autopsy.Rates, delta: float) -> None:
    """Prints the pooled rates beside the paper's."""
    disputed = rates.outside * rates.disputed
    counted = f"{disputed:.1f} of {rates.outside:.1f} tokens outside disputed (an update's mean, summed over rollouts)"
    table = Table(title=f"Direction autopsy at delta = {delta}: {counted}")
    for column in ("", "ratio", "predictive", "paper: ratio", "paper: predictive"):
        table.add_column(column, justify="right" if column else "left")
    for name, words in (
        ("unsafe_keep", "unsafe-keep (less is better)"),
        ("contraction_keep", "contraction-keep (more)"),
    ):
        values = (*getattr(rates, name), *autopsy.PAPER[name])
        table.add_row(words, *(f"{100 * value:.1f} %" for value in values))
    Console().print(table)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    command_line.run(main)
