"""Metrics to metrics.jsonl and TensorBoard; a row is whole or absent, and a resumed run never repeats one.

`reduce_updates` turns what the steps left on the devices into numbers, `MetricsWriter` writes them, `read_rows` reads
them back. metrics.jsonl is JSON in the strict sense: where there is no number (NaN, infinity) it says null.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from jaxrl_llm import processes
from jaxrl_llm.objectives import Metric


def reduce_updates(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """One number per metric for a rollout's updates: numerators and denominators added, then divided. One transfer.

    A metric whose last name begins with `max_` is the largest of its values instead. One that nothing counted towards
    (an empty mask) is left out.

    Args:
      updates: the metrics of each update, all with the same names.
    """
    result = {}
    updates = processes.fetch(list(updates))
    for name in updates[0] if updates else ():
        pairs = [(float(update[name].numerator), float(update[name].denominator)) for update in updates]
        if name.rpartition("/")[2].startswith("max_"):
            values = [numerator / denominator for numerator, denominator in pairs if denominator > 0]
            if values:
                result[name] = float(np.max(values))  # numpy's lets NaN through, Python's only sometimes
        elif (total := sum(denominator for _, denominator in pairs)) > 0:
            result[name] = sum(numerator for numerator, _ in pairs) / total
    return result


class MetricsWriter:
    """Appends rows. A context manager, so that both files are closed whatever happens. Only process 0 writes.

    On opening with `resume_at`, rows of later rollouts and a torn last line are dropped, since those rollouts are run
    again.
    """

    def __init__(self, path: pathlib.Path, tensorboard: pathlib.Path, resume_at: int | None = None):
        """
        Args:
          path: metrics.jsonl.
          tensorboard: directory of event files.
          resume_at: last rollout whose row stays; None starts from nothing.

        Raises:
          ValueError: resuming a file with a broken row before its last line.
        """
        self._path, self._last, self._file = path, -1 if resume_at is None else resume_at, None
        if jax.process_index() != 0:
            return
        rows = [] if resume_at is None else [row for row in read_rows(path) if row["rollout"] <= resume_at]
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.writelines(map(_line, rows))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        self._file = path.open("a")
        # The events are a copy of the rows. A killed run has lost its last ones, so they are all written anew.
        shutil.rmtree(tensorboard, ignore_errors=True)
        self._events = SummaryWriter(str(tensorboard), purge_step=0, flush_secs=10)
        for row in rows:
            self._add_events(row)

    def write(self, rollout: int, values: Mapping[str, Any]) -> None:
        """One row of numbers for `rollout`, on disk when this returns.

        Raises:
          ValueError: a rollout that has its row already, or a value that is not a number; names it.
          OSError: the file cannot be written (a full disk, say); names it.
        """
        if rollout <= self._last:
            raise ValueError(f"{self._path} has a row for rollout {self._last} already; {rollout} does not follow it")
        row = {"rollout": rollout} | {name: _number(name, value) for name, value in values.items()}
        self._last = rollout
        if self._file is None:
            return
        try:
            self._file.write(_line(row))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: a row could not be written", str(self._path)) from error
        self._add_events(row)

    def close(self) -> None:
        """Closes both files."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written has been told by `write`
                self._file.close()
            self._events.close()

    def _add_events(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "rollout" and value is not None and math.isfinite(value):
                self._events.add_scalar(name, value, row["rollout"])

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The whole rows of a metrics file; a torn last line (the run was killed while writing it) is left out.

    Returns:
      Rows in the order of the file, each with `rollout`; empty where there is no file. Null stands for no number.

    Raises:
      ValueError: a broken line elsewhere; names file and line.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    if lines and not lines[-1]:
        lines.pop()  # the file ends with a line's end
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rollout = row["rollout"]
            if isinstance(rollout, bool) or not isinstance(rollout, int):
                raise TypeError(f"rollout is {rollout!r}")
        except (ValueError, TypeError, LookupError) as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not a row of metrics ({error})") from error
        else:
            rows.append(row)
    return rows


def _number(name: str, value: Any) -> float:
    """A Python number from any scalar, NumPy's and JAX's included."""
    if isinstance(value, (bool, int, float)):
        return value
    try:
        if isinstance(value, (str, bytes)):  # float() would read digits out of it
            raise TypeError
        return float(np.asarray(value).reshape(()))
    except (TypeError, ValueError):
        raise ValueError(f"metric {name!r} is {value!r}; it must be one number") from None


def _line(row: Mapping[str, Any]) -> str:
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean, allow_nan=False) + "\n"
