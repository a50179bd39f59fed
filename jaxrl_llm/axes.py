"""The axes of the device mesh: their names, the mesh that a program is compiled for, and what of it divides an array.

`training/sharding.py` says what an axis does to parameters and batches, `rollout/placement.py` to sampling. Tokens lie in
one of two ways. In whole sequences [B, L], as training has them, `sequence` divides the columns and every device works on
its part of each row (context parallelism); only what mixes tokens of a row looks beyond it. Sequences that are decoded
token by token are divided among the devices as wholes, over `sequence` too.
"""

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

DATA, FSDP, SEQUENCE, TENSOR, EXPERT = "data", "fsdp", "sequence", "tensor", "expert"
NAMES = (DATA, FSDP, SEQUENCE, TENSOR, EXPERT)  # in the order of the mesh
ROWS = (DATA, FSDP)  # divide the rows of a batch
TOKENS = (*ROWS, SEQUENCE)  # divide its tokens one by one, and sequences that are decoded

Axes = str | tuple[str, ...] | None


def current() -> Any | None:
    """The mesh that a program is being compiled for (`jax.set_mesh`), where it has several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def names(axes: Axes) -> tuple[str, ...]:
    """One name, several or none (an entry of a `PartitionSpec`) as a tuple."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def parts(mesh: Any | None, axes: Axes) -> int:
    """Into how many parts these axes divide an array; what the mesh lacks counts 1."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in names(axes))


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is no smaller than `size`: what divides evenly into so many parts."""
    return -(-size // multiple) * multiple


def even(size: int, mesh: Any, axes: Axes) -> Axes:
    """As many of `axes`, from the first, as the mesh has and as divide `size` together; None for none."""
    there = tuple(axis for axis in names(axes) if axis in mesh.shape)
    while there and size % parts(mesh, there):
        there = there[:-1]
    return (axes if isinstance(axes, str) else there) if there else None


def whole_sequences(rows: int, columns: int) -> P:
    """How tokens [B, L] of whole sequences are divided in the program under way: (rows, columns)."""
    mesh = current()
    if mesh is None:
        return P(None, None)
    return P(even(rows, mesh, ROWS), even(columns, mesh, SEQUENCE) if parts(mesh, SEQUENCE) > 1 else None)


def decoded_sequences(rows: int) -> P:
    """How tokens [R, Q] of sequences that are decoded are divided in the program under way: (rows, None)."""
    mesh = current()
    return P(None if mesh is None else even(rows, mesh, TOKENS), None)


def by_columns(x: jax.Array, tokens: P) -> jax.Array:
    """x [B, L, ...], on a mesh that divides the columns of `tokens` divided like them; else as it is."""
    return x if tokens[1] is None else jax.lax.with_sharding_constraint(x, tokens)


def along_vocabulary(table: jax.Array, tokens: P) -> jax.Array:
    """An embedding [V, D], on a mesh that divides the columns of `tokens` with whole vectors; else as it is.

    Vectors that came out in parts would have to be put together for all tokens before these could be divided.
    """
    if tokens[1] is None:
        return table
    return jax.lax.with_sharding_constraint(table, P(even(len(table), current(), TENSOR)))


def by_heads(x: jax.Array, tokens: P) -> jax.Array:
    """x [B, L, H, ...], on a mesh that divides the columns of `tokens` with whole columns and H divided; else as it is."""
    if tokens[1] is None:
        return x
    heads = even(x.shape[2], current(), tokens[1])
    return jax.lax.with_sharding_constraint(x, P(tokens[0], None, heads))
