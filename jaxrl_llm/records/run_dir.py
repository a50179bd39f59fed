"""The run directory: what a run leaves, and where.

    config.json            the whole configuration
    metrics.jsonl          one row per rollout, evaluations included
    tensorboard/           the same numbers for TensorBoard
    plots/training.png     pictures of the run
    samples/               completions: before.md, after.md, and every evaluation's; each with a .jsonl for programs
    checkpoints/           orbax checkpoints

`config.json` is written last and in one piece: a directory that has it holds a run, one without it does not.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


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

    @property
    def folders(self) -> tuple[pathlib.Path, ...]:
        return self.tensorboard, self.plots, self.samples, self.checkpoints

    def read_config(self) -> dict[str, Any]:
        """The configuration that the run was started with.

        Raises:
          ValueError: there is no configuration, or it is not a run's; names the file.
        """
        try:
            config = json.loads(self.config.read_text())
        except FileNotFoundError:
            raise ValueError(f"{self.path} is not a run directory: it has no config.json") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.config} cannot be read: {error}") from error
        if not isinstance(config, dict) or "run_dir" not in config:
            raise ValueError(f"{self.config} is not a run's configuration: it has no field run_dir")
        return config

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replaces the configuration in one piece: for a run that is resumed with a changed one."""
        if jax.process_index() == 0:
            os.replace(_write_aside(self.config, config), self.config)


def open_run_dir(path: str, config: Mapping[str, Any], *, resume: bool, overwrite: bool) -> RunDir:
    """Makes, or on `resume` finds, the run directory. Process 0 does the work; every process calls this.

    A new run's configuration is written; a resumed one's is left as it is, for the caller to compare with (see
    `RunDir.write_config`).

    Args:
      path: the directory, `config.run_dir`.
      config: the whole configuration.
      resume: go on with the run that is there.
      overwrite: replace the run that is there; files that no run writes stay.

    Raises:
      ValueError: the directory holds a run already and neither `resume` nor `overwrite` is set, there is no run to
        resume, it holds something that is not a run's, or it cannot be written; says which.
    """
    run, error = RunDir(pathlib.Path(path).absolute()), None
    if jax.process_index() == 0:
        try:
            _find(run, path) if resume else _create(run, path, config, overwrite)
        except ValueError as refused:
            error = refused
        except OSError as failed:
            error = ValueError(f"config.run_dir {path!r} cannot be written: {failed.strerror or failed}")
    if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.int32(error is not None)):
        error = error or ValueError(f"config.run_dir {path!r} was refused by process 0; its message says why")
    if error is not None:
        raise error
    return run


def _find(run: RunDir, path: str) -> None:
    if not run.config.exists():
        raise ValueError(f"config.run_dir {path!r} holds no run to resume (no config.json); start without --resume")
    run.read_config()
    for folder in run.folders:
        folder.mkdir(exist_ok=True)
    _require_writable(run.path)


def _create(run: RunDir, path: str, config: Mapping[str, Any], overwrite: bool) -> None:
    if run.config.exists():
        if not overwrite:
            raise ValueError(
                f"config.run_dir {path!r} already holds a run; use --resume to go on, --overwrite to replace it,"
                " or another --config.run_dir"
            )
        run.read_config()  # a config.json of something else, a model's for example, is not ours to replace
        run.config.unlink()  # first, so that what is half removed is no run
        for old in (run.metrics, *run.folders):
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    foreign = [p.name for p in (run.metrics, *run.folders) if p.is_file() or (p.is_dir() and any(p.iterdir()))]
    if foreign:
        raise ValueError(
            f"config.run_dir {path!r} holds {', '.join(foreign)} but no run (no config.json); clear it or choose"
            " another"
        )
    for folder in run.folders:
        folder.mkdir(parents=True, exist_ok=True)
    _require_writable(run.path)
    aside = _write_aside(run.config, config)
    try:
        os.link(aside, run.config)  # unlike a rename it fails where another run has just begun
    except FileExistsError:
        raise ValueError(f"config.run_dir {path!r} was taken by another run just now; choose another") from None
    except OSError:  # a file system without hard links
        os.replace(aside, run.config)
    finally:
        aside.unlink(missing_ok=True)


def _require_writable(folder: pathlib.Path) -> None:
    probe = folder / f".probe-{os.getpid()}"
    probe.touch()
    probe.unlink()


def _write_aside(target: pathlib.Path, config: Mapping[str, Any]) -> pathlib.Path:
    aside = target.with_name(f".{target.name}-{os.getpid()}")
    with aside.open("w") as file:
        file.write(json.dumps(config, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return aside
