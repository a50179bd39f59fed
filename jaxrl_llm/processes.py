"""What the processes of one run tell each other: divided arrays as whole values, values of each, and what went wrong.

Every process runs the same program on the same host values and holds its part of every divided array. These functions
are the only places where that part becomes the whole. All processes must call them in the same order; alone, a process
gets its own values back. This module imports no other module of the package.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


class OtherProcess(RuntimeError):
    """Another process failed where this one did not; its own message says why."""


def fetch(tree: Any) -> Any:
    """The arrays as NumPy values on this host, whole, wherever their parts lie."""
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def one(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return jax.device_get(x)
        if not x.is_fully_replicated:
            return multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x.addressable_data(0))

    return jax.tree.map(one, tree)


def gather(value: np.ndarray) -> np.ndarray:
    """[processes, ...]: what each process holds under this name, by process; exact for every dtype.

    Args:
      value: of the same shape and dtype in every process.
    """
    value = np.asarray(value)
    if jax.process_count() == 1:
        return value[None]
    # As bytes: on the devices, 64-bit numbers would be rounded to 32.
    whole = multihost_utils.process_allgather(np.frombuffer(value.tobytes(), np.uint8))
    return np.frombuffer(whole.tobytes(), value.dtype).reshape(-1, *value.shape)


def part(count: int) -> slice:
    """The share of `count` things that this process works on; all processes' shares follow each other."""
    size = -(-count // jax.process_count())
    return slice(min(jax.process_index() * size, count), min((jax.process_index() + 1) * size, count))


def gather_parts(values: np.ndarray, count: int) -> np.ndarray:
    """[count, ...] from each process's values of its `part`."""
    size = -(-count // jax.process_count())
    padded = np.zeros((size, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return gather(padded).reshape(-1, *values.shape[1:])[:count]


def agree(error: BaseException | None, what: str) -> None:
    """Raises where any process failed: its own `error`, or `OtherProcess` in those that did not."""
    failed = gather(np.bool_(error is not None))
    if error is not None:
        raise error
    if failed.any():
        raise OtherProcess(f"{what} failed in process {int(np.argmax(failed))}; its message says why")
