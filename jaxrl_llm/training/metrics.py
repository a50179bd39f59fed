"""Metrics to metrics.jsonl and TensorBoard; a row is whole or absent, and a resumed run never repeats one."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from tensorboardX import SummaryWriter

from jaxrl_llm.objectives import Metric


def reduce_updates(updates: list[dict[str, Metric]]) -> dict[str, float]:
    """The means of a rollout's updates: numerators and denominators of all of them, added, then divided. One transfer.

    A metric that nothing counted towards (an empty mask) is left out.
    """
    result = {}
    updates = jax.device_get(updates)
    for name in updates[0] if updates else ():
        numerator = sum(float(update[name].numerator) for update in updates)
        denominator = sum(float(update[name].denominator) for update in updates)
        if denominator > 0:
            result[name] = numerator / denominator
    return result


class MetricsWriter:
    """Appends rows. A context manager, so that both files are closed whatever happens.

    On opening with `resume_at`, rows of later rollouts and a torn last line are dropped, since those rollouts are run again.
    """

    def __init__(self, path: pathlib.Path, tensorboard: pathlib.Path, resume_at: int | None = None):
        """
        Args:
          path: metrics.jsonl.
          tensorboard: directory of event files.
          resume_at: last rollout whose row stays; None starts from nothing.
        """
        rows = [] if resume_at is None else [row for row in read_rows(path) if row["rollout"] <= resume_at]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(_line(row) for row in rows))
        os.replace(temporary, path)
        self._file = path.open("a")
        self._events = SummaryWriter(str(tensorboard), purge_step=None if resume_at is None else resume_at + 1)

    def write(self, rollout: int, values: Mapping[str, float]) -> None:
        """One row of `values` for `rollout`, flushed."""
        row = {"rollout": rollout, **values}
        self._file.write(_line(row))
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._events.add_scalar(name, value, rollout)

    def close(self) -> None:
        """Flushes and closes both files."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The whole rows of a metrics file; a torn last line (the run was killed while writing it) is left out.

    Raises:
      ValueError: a broken line elsewhere; names file and line.
    """
    rows = []
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not a row of metrics ({error})") from error
    return rows


def _line(row: Mapping[str, Any]) -> str:
    # JSON has no NaN or infinity; null says that there is no number.
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean) + "\n"
