"""Checkpoints with orbax: asynchronous, atomic, checked against the state they are restored into.

A checkpoint holds the TrainState and a small JSON record (configuration, data position, best evaluation). Arrays are
saved under their paths, so a checkpoint of another model is refused by the name of the first parameter that differs,
and one saved on one device mesh is restored onto another.
"""

import json
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep_policy

METRIC = "accuracy"


class Checkpoints:
    """Saves and restores. A context manager: leaving it waits for the save in progress."""

    def __init__(self, path: pathlib.Path, keep: int = 2):
        """
        Args:
          path: directory of the checkpoints.
          keep: how many recent ones stay; the best by evaluation stays besides.
        """
        self.path = path
        policy = keep_policy.AnyPreservationPolicy(
            [
                keep_policy.LatestN(keep),
                keep_policy.BestN(get_metric_fn=lambda m: m[METRIC], n=1, keep_checkpoints_without_metrics=False),
            ]
        )
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(path.absolute(), options=options)

    def save(self, rollout: int, state: Any, record: dict[str, Any], accuracy: float | None = None) -> None:
        """Starts saving `state` and `record` under `rollout`; an earlier checkpoint of that number stays as it is."""
        if rollout in self._manager.all_steps():
            return
        self._manager.save(
            rollout,
            args=ocp.args.Composite(state=ocp.args.StandardSave(_flatten(state)), record=ocp.args.JsonSave(record)),
            metrics=None if accuracy is None else {METRIC: accuracy},
        )

    def restore(self, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest readable checkpoint as (rollout, state, record), or None where there is none.

        Args:
          like: a state (arrays or shapes with shardings) that says structure, shapes and placement.

        Raises:
          ValueError: the checkpoint is of another model (names the first difference), or none can be read.
        """
        errors = []
        for rollout in sorted(self._manager.all_steps(), reverse=True):
            try:
                return rollout, *self._restore(rollout, like)
            except OtherModel:
                raise
            except Exception as error:  # orbax raises many kinds for a damaged checkpoint
                errors.append(f"  {self.path / str(rollout)}: {type(error).__name__}: {str(error).splitlines()[0]}")
                print(f"checkpoint {rollout} cannot be read, trying the one before:\n{errors[-1]}", flush=True)
        if errors:
            raise ValueError(f"no readable checkpoint in {self.path}:\n" + "\n".join(errors))
        return None

    def _restore(self, rollout: int, like: Any) -> tuple[Any, dict[str, Any]]:
        wanted = _flatten(like)
        record = self._manager.restore(rollout, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
        found = self._manager.item_metadata(rollout)["state"]
        _same_model(self.path / str(rollout), wanted, found)
        abstract = jax.tree.map(_abstract, wanted)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        flat = self._manager.restore(rollout, args=args)["state"]
        return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in wanted]), record

    def wait(self) -> None:
        """Returns when the save in progress is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then lets go of the directory."""
        self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class OtherModel(ValueError):
    """The checkpoint holds other arrays than the run's state."""


def config_difference(old: Any, new: Any, path: str = "config") -> list[str]:
    """Lines "field: old -> new" for every leaf in which two nested configurations differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in sorted(old.keys() | new.keys()):
            lines += config_difference(old.get(key, "(absent)"), new.get(key, "(absent)"), f"{path}.{key}")
        return lines
    same = json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True)
    return [] if same else [f"{path}: {old!r} -> {new!r}"]


def _flatten(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _same_model(path: pathlib.Path, wanted: dict[str, Any], found: Any) -> None:
    for name in wanted.keys() - found.keys() | found.keys() - wanted.keys():
        where = "is missing from" if name in wanted else "is only in"
        raise OtherModel(f"{path} is a checkpoint of another model: {name} {where} the checkpoint")
    for name, leaf in wanted.items():
        if tuple(found[name].shape) != tuple(leaf.shape):
            raise OtherModel(
                f"{path} is a checkpoint of another model: {name} has shape {tuple(found[name].shape)} there,"
                f" {tuple(leaf.shape)} here"
            )
