"""A finished (or running) run's policy, read back from its directory."""

import dataclasses
import pathlib
from collections.abc import Callable

from jaxrl_llm import tasks
from jaxrl_llm.config import RunConfig
from jaxrl_llm.experience import policy as policies
from jaxrl_llm.experience.policy import Policy
from jaxrl_llm.parallel import sharding
from jaxrl_llm.records.checkpoints import Checkpoints
from jaxrl_llm.records.run_dir import RunDir
from jaxrl_llm.tasks import Task


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """What a run directory holds.

    Attributes:
      run: its configuration.
      task: what it was trained on.
      policy: with the checkpoint's parameters.
      rollout: the checkpoint's number.
    """

    run: RunConfig
    task: Task
    policy: Policy
    rollout: int


def load(
    path: str, rollout: int | None = None, report: Callable[[str], None] = print, *, best: bool = False
) -> LoadedRun:
    """Reads the policy of the run at `path`; changes nothing there, and reads no tensor of the checkpoint it began with.

    Args:
      path: the run directory.
      rollout: which checkpoint; the newest readable one by default.
      report: takes one line about what a person should know.
      best: without `rollout`, the checkpoint that was evaluated best, the newest where none was evaluated.

    Raises:
      ValueError: no run directory, no such checkpoint, or one of another model; names it.
    """
    run_dir = RunDir(pathlib.Path(path))
    run = RunConfig.read(run_dir.read_config())
    task = tasks.create(run.task)
    policy = policies.describe(run, task)
    like = {"params": sharding.describe(policy.params, sharding.reading_mesh(run.mesh))}
    with Checkpoints(run_dir.checkpoints, read_only=True, report=report) as checkpoints:
        if best and rollout is None:
            rollout = checkpoints.best()
        restored = checkpoints.restore(like, rollout, partial=True)
    return LoadedRun(run, task, dataclasses.replace(policy, params=restored.state["params"]), restored.rollout)
