"""The run directory: what a run leaves, and where.

    config.json            the whole configuration
    metrics.jsonl          one row per rollout and per evaluation
    tensorboard/           the same numbers for TensorBoard
    plots/training.png     pictures of the run
    samples/               completions: before.md, after.md, and every evaluation's
    checkpoints/           orbax checkpoints
"""

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any


@dataclasses.dataclass(frozen=True)
class RunDir:
    """Paths inside a run directory."""

    path: pathlib.Path

    @property
    def config(self) -> pathlib.Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> pathlib.Path:
        return self.path / "tensorboard"

    @property
    def plots(self) -> pathlib.Path:
        return self.path / "plots"

    @property
    def samples(self) -> pathlib.Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.path / "checkpoints"

    def read_config(self) -> dict[str, Any]:
        """The configuration that the run was started with."""
        return json.loads(self.config.read_text())


def open_run_dir(path: str, config: dict[str, Any], *, resume: bool, overwrite: bool) -> RunDir:
    """Makes (or, resuming, finds) the run directory and writes the configuration into it.

    Raises:
      ValueError: the directory holds a run already and neither `resume` nor `overwrite` is set, there is nothing to
        resume, or it cannot be written; says which.
    """
    run = RunDir(pathlib.Path(path).absolute())
    exists = run.config.exists()
    if resume and not exists:
        raise ValueError(f"config.run_dir {path!r} holds no run to resume (no config.json); start without --resume")
    if exists and not (resume or overwrite):
        raise ValueError(
            f"config.run_dir {path!r} already holds a run; use --resume to go on, --overwrite to replace it,"
            " or another --config.run_dir"
        )
    try:
        if exists and overwrite and not resume:
            shutil.rmtree(run.path)
        for folder in (run.path, run.tensorboard, run.plots, run.samples, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        temporary = run.config.with_suffix(".tmp")
        temporary.write_text(json.dumps(config, indent=2) + "\n")
        os.replace(temporary, run.config)
    except OSError as error:
        raise ValueError(f"config.run_dir {path!r} cannot be written: {error}") from error
    return run
