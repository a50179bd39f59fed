"""A run looked at from Python: its configuration, numbers, completions and pictures."""

import dataclasses
import json
import os
import pathlib

import ml_collections
import pandas
from matplotlib.figure import Figure

from jaxrl_llm.api.policy import LoadedPolicy, load
from jaxrl_llm.records import plots
from jaxrl_llm.records.metrics import read_rows
from jaxrl_llm.records.run_dir import RunDir


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory, read each time it is asked, so that a run under way can be watched.

    Attributes:
      directory: paths of everything in it.
    """

    directory: RunDir

    @property
    def path(self) -> pathlib.Path:
        return self.directory.path

    @property
    def config(self) -> ml_collections.ConfigDict:
        """The whole configuration that the run was started with."""
        return ml_collections.ConfigDict(self.directory.read_config())

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row per rollout, 0 before RL, indexed by `rollout`; a column per metric, NaN where a row has none."""
        rows = read_rows(self.directory.metrics)
        return pandas.DataFrame(rows).set_index("rollout") if rows else pandas.DataFrame()

    def samples(self, name: str = "after") -> pandas.DataFrame:
        """Completions of the held-out prompts: "before", "after", or those of an evaluation, "rollout-00010".

        Columns: id, prompt, completion, answer, reward, finish.

        Raises:
          ValueError: there are none of that name; lists what there is.
        """
        file = self.directory.samples / f"{name}.jsonl"
        if not file.is_file():
            there = sorted(path.stem for path in self.directory.samples.glob("*.jsonl"))
            raise ValueError(f"{self.path} has no samples {name!r}; it has {', '.join(there) or 'none yet'}")
        return pandas.DataFrame([json.loads(line) for line in file.read_text().splitlines()])

    def plot(self) -> Figure:
        """The picture of `plots/training.png`, of the numbers as they are now.

        Raises:
          ValueError: there are no numbers yet.
        """
        rows = read_rows(self.directory.metrics)
        if not rows:
            raise ValueError(f"{self.path} has no metrics to plot yet")
        return plots.figure([rows], [self.path.name])

    def policy(self, checkpoint: int | None = None, *, best: bool = False) -> LoadedPolicy:
        """The policy of a checkpoint; see `load`."""
        return load(self.path, checkpoint, best=best)


def read_run(path: str | os.PathLike) -> Run:
    """The run at `path`.

    Raises:
      ValueError: it is no run directory; names it.
    """
    run = Run(RunDir(pathlib.Path(path)))
    run.directory.read_config()
    return run
