"""From a batch to mini-batches and micro-batches, and back. Pure functions."""

from typing import Any

import chex
import jax

from jaxrl_llm.types import Batch, Packing


def split(batch: Batch, parts: int) -> Batch:
    """[B, ...] -> [parts, B / parts, ...]; part i takes the rows b with b % parts == i.

    Interleaving keeps every device's rows on that device when the batch axis is sharded in blocks. A packed batch is split
    into the parts that it was packed for, whatever `parts` says.
    """
    rows, parts = batch.tokens.shape[0], parts if batch.packing is None else batch.packing.parts
    if rows % parts:
        raise ValueError(f"{rows} rows do not divide into {parts} parts")
    return jax.tree.map(lambda x: x.reshape(rows // parts, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def join(parts: Any) -> Any:
    """[parts, B / parts, ...] -> [B, ...], the reverse of `split` for what was computed from its parts."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), parts)


def take(batch: Batch, rows: chex.Array, packing: Packing | None = None) -> Batch:
    """The rows of `batch` named by `rows` (int [n]), with their own packing."""
    return jax.tree.map(lambda x: x[rows], batch.replace(packing=None)).replace(packing=packing)
