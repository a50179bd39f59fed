"""A run from Python: what `experiments/train.py` does."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from jaxrl_llm.api.runs import Run, read_run
from jaxrl_llm.config import RunConfig
from jaxrl_llm.training import loop
from jaxrl_llm.training.callbacks import Callback


def train(
    config: RunConfig | Mapping[str, Any],
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> Run:
    """Trains a policy, and reads what the run left.

    Args:
      config: a ConfigDict (`jaxrl_llm.default_config()`, changed), a mapping of the fields that differ, or a checked `RunConfig`.
      callbacks: each is called with every row of the metrics (a mapping with `rollout`); one that returns True ends the run, which
        is saved as at a SIGTERM and can be resumed.
      resume: go on from the run directory's last checkpoint.
      overwrite: replace a run that is there.
      console: where progress goes; the terminal or the notebook by default.

    Raises:
      ValueError: the configuration cannot work, or the run directory is taken; names the field.
    """
    run = config if isinstance(config, RunConfig) else RunConfig.read(config)
    loop.train(run, resume=resume, overwrite=overwrite, console=console, callbacks=callbacks)
    return read_run(run.run_dir)
