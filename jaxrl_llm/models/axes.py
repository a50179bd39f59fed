"""The mesh axes that models know of, and which of them divide an array in the program that is being compiled.

Rows of a batch lie over `ROWS`. The tokens of a row lie over `SEQUENCE` (context parallelism): everything that treats
tokens one by one is divided so, and attention gathers keys and values. Heads and widths lie over `TENSOR`, experts over
`EXPERT`. Outside `jax.set_mesh`, and on one device, nothing here does anything.
"""

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

ROWS, SEQUENCE, TENSOR, EXPERT = ("data", "fsdp"), "sequence", "tensor", "expert"

Axes = str | tuple[str, ...]


def current() -> Any | None:
    """The mesh that a program is being compiled for, where it has several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def even(mesh: Any, size: int, axes: Axes) -> Axes | None:
    """`axes`, as far as the mesh has them, where they divide `size`; else None."""
    sizes = dict(mesh.shape)
    present = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if axis in sizes)
    if not present or size % math.prod(sizes[axis] for axis in present):
        return None
    return axes if isinstance(axes, str) else present


def tokens(mesh: Any, rows: int, length: int) -> tuple[Axes | None, Axes | None]:
    """What divides the first two axes of an array [rows, length, ...]; a decoding step, of length 1, has rows alone."""
    if length == 1:
        return even(mesh, rows, (*ROWS, SEQUENCE)), None
    return even(mesh, rows, ROWS), even(mesh, length, SEQUENCE)


def sequence_parts(length: int) -> int:
    """Devices over which the tokens of a row of `length` are divided in this program."""
    mesh = current()
    divided = mesh is not None and length > 1 and even(mesh, length, SEQUENCE)
    return mesh.shape[SEQUENCE] if divided else 1


def divide_tokens(x: jax.Array) -> jax.Array:
    """x [B, L, ...] with its tokens divided over `SEQUENCE`, where there are several devices for them."""
    if sequence_parts(x.shape[1]) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, P(*tokens(current(), *x.shape[:2])))


def gather_tokens(x: jax.Array) -> jax.Array:
    """x [B, L, ...] with every row whole on its devices: for what goes through the tokens one after another."""
    if sequence_parts(x.shape[1]) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, P(tokens(current(), *x.shape[:2])[0]))
