"""Checkpoints with orbax: asynchronous, atomic, checked against the state they are restored into.

A checkpoint holds a state (any pytree of arrays, here the TrainState) and a small JSON record (configuration, data
position, evaluation). Arrays are saved under their paths, so a checkpoint of another model is refused by the name of
the first array that differs, and one saved on one device mesh is restored onto another. What is on disk under a
rollout's number is complete: a save that was killed or that failed leaves nothing there. One that was damaged later
(torn, emptied, bits flipped) is noticed and passed over in favour of the one before it.

Layout, under `checkpoints/`: one folder for each kept rollout, with `state` and `record`; `damaged-<rollout>` where one
could not be read.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep_policy

from jaxrl_llm import processes
from jaxrl_llm.parallel.array_names import flatten
from jaxrl_llm.records.fingerprint import fingerprints

# Settings whose change leaves the results of a run as they are, so that resuming with another value is no surprise.
HARMLESS = ("config.run_dir", "config.checkpoint")


class OtherModel(ValueError):
    """The checkpoint holds other arrays than the run's state."""


class SaveError(OSError):
    """A checkpoint could not be written; those on disk are as they were."""


class Damaged(ValueError):
    """The checkpoint's numbers are not those that were saved."""


class Restored(NamedTuple):
    """A checkpoint read back.

    Attributes:
      rollout: the number that it was saved under.
      state: the pytree, placed as `like` asked.
      record: the JSON record.
    """

    rollout: int
    state: Any
    record: dict[str, Any]


class Checkpoints:
    """Saves and restores. A context manager: leaving it waits for the save in progress."""

    def __init__(
        self,
        path: pathlib.Path | str,
        keep: int = 2,
        *,
        read_only: bool = False,
        report: Callable[[str], None] = print,
    ):
        """
        Args:
          path: directory of the checkpoints; made where missing, unless `read_only`.
          keep: how many recent ones stay; the best by evaluation stays besides.
          read_only: for reading another run's checkpoints; changes nothing on disk.
          report: takes one line about what a person should know (a damaged checkpoint was passed over).

        Raises:
          ValueError: the directory cannot be made or written or, with `read_only`, holds no checkpoint; names it.
        """
        self.path = pathlib.Path(path).absolute()
        self._read_only, self._report = read_only, report
        if read_only:
            _require_checkpoints(self.path)
        else:
            _require_writable(self.path)
        self._accuracies = _read_accuracies(self.path)
        keep_some = keep_policy.AnyPreservationPolicy([keep_policy.LatestN(keep), _KeepBest(self._accuracies)])
        # Named here, so that a checkpoint can be read by a process that has saved none.
        handlers = {"state": ocp.PyTreeCheckpointHandler(), "record": ocp.JsonCheckpointHandler()}
        with _errors_only() if read_only else contextlib.nullcontext():  # orbax warns of all that read_only means
            options = ocp.CheckpointManagerOptions(
                preservation_policy=keep_policy.PreserveAll() if read_only else keep_some,
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
            )
            self._manager = ocp.CheckpointManager(self.path, options=options, item_handlers=handlers)

    def rollouts(self) -> list[int]:
        """Numbers of the checkpoints, rising."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """Number of the newest checkpoint, or None."""
        return max(self.rollouts(), default=None)

    def best(self) -> int | None:
        """Number of the checkpoint with the highest accuracy (the newest of equals), or None where none has one."""
        return _best(self.rollouts(), self._accuracies)

    def save(self, rollout: int, state: Any, record: dict[str, Any], accuracy: float | None = None) -> None:
        """Starts saving `state` and `record` under `rollout`; `state` may be donated and `record` changed at once.

        Checkpoints of this and of later rollouts are removed: they belong to a course of the run that was left when an
        earlier one was restored.

        Raises:
          SaveError: this save, or the one started before it, could not be written (a full disk, say).
        """
        if accuracy is not None and math.isnan(accuracy):
            accuracy = None
        flat = flatten(state)
        # Written by another thread while the loop goes on changing its record: the text is made now.
        note = {"record": json.loads(json.dumps(record)), "accuracy": accuracy, "fingerprints": fingerprints(flat)}
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(flat), record=ocp.args.JsonSave(note | {"checksum": _checksum(note)})
        )
        try:
            if any(other >= rollout for other in self.rollouts()):
                self._manager.wait_until_finished()
                for other in self.rollouts():
                    if other >= rollout:
                        self._manager.delete(other)
            self._accuracies[rollout] = accuracy
            self._manager.save(rollout, args=args, force=True)
        except Exception as error:
            raise self._failed(error) from error

    def restore(self, like: Any, rollout: int | None = None, *, partial: bool = False) -> Restored | None:
        """Reads the newest readable checkpoint, or None where there is none.

        A damaged one is reported, passed over and, once an earlier one has been read, set aside as
        `damaged-<rollout>`.

        Args:
          like: a state (arrays, or shapes with shardings) that says structure, shapes, dtypes and placement.
          rollout: read this one and no other.
          partial: `like` names only a part of the state (the parameters without the optimizer's); the rest stays
            unread.

        Raises:
          ValueError: the checkpoint is of another model (`OtherModel`, names the first difference), `rollout` is not
            there, or none can be read.
        """
        found = self.rollouts()
        if rollout is not None and rollout not in found:
            raise ValueError(
                f"no checkpoint {rollout} in {self.path}; choose from: {', '.join(map(str, found)) or 'none'}"
            )
        damaged = {}
        for number in reversed(found) if rollout is None else [rollout]:
            try:
                restored = self._read(number, like, partial)
            except OtherModel:
                raise
            except Exception as error:  # orbax raises many kinds for a damaged checkpoint
                damaged[number] = _reason(error)
                self._report(f"checkpoint {self.path / str(number)} cannot be read ({damaged[number]})")
                continue
            if damaged and not self._read_only:
                self._set_aside(damaged)
            if damaged:
                self._report(f"going on from checkpoint {number} instead")
            return restored
        if damaged:
            lines = "".join(f"\n  {number}: {why}" for number, why in damaged.items())
            raise ValueError(f"no checkpoint in {self.path} can be read:{lines}")
        return None

    def wait(self) -> None:
        """Returns when the save in progress is on disk.

        Raises:
          SaveError: it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Waits, then lets go of the directory."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except SaveError as failure:
            if error is None:
                raise
            self._report(str(failure))  # the error under way matters more

    def _read(self, number: int, like: Any, partial: bool) -> Restored:
        wanted, note, flat, error = flatten(like), {}, {}, None
        try:
            note, flat = self._load(number, wanted, partial)
        except Exception as caught:  # what one process cannot read, none may go on with
            error = caught
        processes.agree(error, f"reading checkpoint {number}")
        for name, value in fingerprints(flat).items():
            if value != note["fingerprints"][name]:
                raise Damaged(f"the checksum of {name} differs from the one it was saved with")
        state = jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in wanted])
        return Restored(number, state, note["record"])

    def _load(self, number: int, wanted: dict[str, Any], partial: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        note = self._manager.restore(number, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
        if note.pop("checksum", None) != _checksum(note):
            raise Damaged("its record is not the one that was saved")
        found = self._manager.item_metadata(number)["state"]
        if found is None:
            raise Damaged("the list of its arrays is missing")
        _same_model(self.path / str(number), wanted, found, partial)
        abstract = jax.tree.map(_abstract, wanted)
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
        args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=partial)
        return note, self._manager.restore(number, args=ocp.args.Composite(state=args))["state"]

    def _set_aside(self, damaged: dict[int, str]) -> None:
        if jax.process_index() == 0:
            for number in damaged:
                target = self.path / f"damaged-{number}"
                shutil.rmtree(target, ignore_errors=True)
                os.rename(self.path / str(number), target)
        processes.gather(np.int32(0))  # nobody looks before the directory is in order
        self._manager.reload()

    def _failed(self, error: Exception) -> SaveError:
        self._manager.reload()
        kept = ", ".join(map(str, self.rollouts())) or "none"
        return SaveError(
            f"a checkpoint could not be written to {self.path}: {_reason(error)}; whole ones there: {kept}"
        )


class _KeepBest(keep_policy.PreservationPolicy):
    """Keeps the checkpoint with the highest accuracy."""

    def __init__(self, accuracies: Mapping[int, float | None]):
        self._accuracies = accuracies

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        best = _best([info.step for info in checkpoints], self._accuracies)
        return [info.step == best for info in checkpoints]


def config_difference(old: Any, new: Any, path: str = "config") -> list[str]:
    """Lines "field: old -> new" for every leaf in which two nested configurations differ, harmless ones left out."""
    if path in HARMLESS:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in sorted(old.keys() | new.keys()):
            lines += config_difference(old.get(key, "(absent)"), new.get(key, "(absent)"), f"{path}.{key}")
        return lines
    same = json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True)
    return [] if same else [f"{path}: {old!r} -> {new!r}"]


@contextlib.contextmanager
def _errors_only():
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _best(rollouts: Sequence[int], accuracies: Mapping[int, float | None]) -> int | None:
    known = [(accuracies[number], number) for number in rollouts if accuracies.get(number) is not None]
    return max(known)[1] if known else None


def _read_accuracies(path: pathlib.Path) -> dict[int, float | None]:
    # Read from the records themselves: a damaged one must not keep the others from being opened.
    accuracies = {}
    for folder in path.iterdir():
        if folder.name.isdigit():
            try:
                accuracies[int(folder.name)] = json.loads((folder / "record" / "metadata").read_text())["accuracy"]
            except (OSError, ValueError, LookupError, TypeError):
                continue
    return accuracies


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    # A shape without placement goes to the first device, not to where the array lay when it was saved.
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _checksum(note: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(note, sort_keys=True).encode())


def _reason(error: BaseException) -> str:
    """One line: the operating system's own words where the storage library wraps them, else the first cause's."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    while error.__cause__ is not None:
        error = error.__cause__
    text = (str(error).splitlines() or [""])[0].partition(" [tensorstore_spec")[0]
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {text}"
    return text[:300] or type(error).__name__


def _require_writable(path: pathlib.Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"checkpoint directory {path} cannot be written: {error.strerror or error}") from error


def _require_checkpoints(path: pathlib.Path) -> None:
    if not path.is_dir():
        raise ValueError(f"checkpoint directory {path} does not exist")
    if not any(child.name.isdigit() and child.is_dir() for child in path.iterdir()):
        inside = ", ".join(sorted(child.name for child in path.iterdir())[:5]) or "nothing"
        raise ValueError(
            f"{path} is not a directory of checkpoints: no folder named by a rollout's number; it holds {inside}"
        )


def _same_model(path: pathlib.Path, wanted: dict[str, Any], found: Any, partial: bool) -> None:
    def refuse(what: str):
        raise OtherModel(f"{path} is a checkpoint of another model: {what}")

    for name, leaf in wanted.items():
        if name not in found:
            refuse(f"{name} is missing from the checkpoint")
        there, here = found[name], leaf
        if tuple(there.shape) != tuple(here.shape):
            refuse(f"{name} has shape {tuple(there.shape)} there, {tuple(here.shape)} here")
        if there.dtype != here.dtype:
            refuse(f"{name} is {there.dtype} there, {here.dtype} here")
    extra = () if partial else sorted(found.keys() - wanted.keys())
    if extra:
        refuse(f"{extra[0]} is only in the checkpoint")
