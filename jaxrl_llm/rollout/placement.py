"""Where sampling lies on a device mesh.

Sequences are divided over `data`, `fsdp` and `sequence`, heads of the cached keys and values and the vocabulary of the
logits over `tensor`, so that every device decodes rows of its own. A draw needs its row's whole vocabulary: for it the
rows are divided over all axes, which costs one exchange of logits and no device the work of another. The mesh is the one
that the parameters lie on; without one, or on one device, nothing here does anything.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm import axes
from jaxrl_llm.models.cache import KeyValue

ALL = (*axes.TOKENS, axes.EXPERT, axes.TENSOR)  # the order in which rows are exchanged for a draw


@flax.struct.dataclass
class Loaded:
    """The parameters as a sampler uses them.

    Attributes:
      params: the decoder's, quantised where that is emulated. Its stacked layers lie as in training.
      layers: the same layers one by one.
      gathered: whether arrays lie elsewhere than in training.
    """

    params: Any
    layers: tuple[Any, ...]
    gathered: bool = flax.struct.field(pytree_node=False, default=False)


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh of several devices that the arrays lie on, or None."""
    for leaf in jax.tree.leaves(tree):
        place = getattr(leaf, "sharding", None)
        if isinstance(place, NamedSharding) and place.mesh.size > 1:
            return place.mesh
    return None


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Makes `mesh` the one that programs are compiled for."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def shards(mesh: Mesh | None) -> int:
    """Parts into which rows are divided."""
    return axes.parts(mesh, axes.TOKENS)


def specs(tree: Any, mesh: Any) -> Any:
    """The tree of `PartitionSpec` of arrays (or shapes) whose first axis, where they have one, counts rows.

    Rows and heads that do not divide evenly stay whole.
    """

    def one(x):
        if isinstance(x, KeyValue):
            rows, heads, *_ = x.keys.shape
            return KeyValue(*[P(axes.even(rows, mesh, axes.TOKENS), axes.even(heads, mesh, axes.TENSOR))] * 2)
        return P(axes.even(x.shape[0], mesh, axes.TOKENS)) if x.ndim else P()

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, KeyValue))


def places(tree: Any, mesh: Mesh) -> Any:
    """`specs` on `mesh`, as a tree of `NamedSharding`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, mesh))


def divide(tree: Any) -> Any:
    """Inside a program: the same arrays, divided as `specs` says."""
    mesh = axes.current()
    if mesh is None:
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs(tree, mesh))


def by_rows(function: Callable[..., Any], logits: jax.Array, *arrays: jax.Array) -> Any:
    """Inside a program: `function(logits, *arrays)`, which treats every row by itself, with the rows over all devices.

    Args:
      function: takes and returns arrays whose first axis counts rows.
      logits: [R, V].
      arrays: [R, ...].
    """
    mesh = axes.current()
    if mesh is None:
        return function(logits, *arrays)
    rows = axes.even(logits.shape[0], mesh, axes.TOKENS)
    logits = jax.lax.with_sharding_constraint(logits, P(rows, axes.even(logits.shape[1], mesh, axes.TENSOR)))
    rows = axes.even(logits.shape[0], mesh, ALL)
    # Mapped by hand, because the compiler would gather all rows wherever it cannot divide an operation (a sort, a top-k).
    mapped = jax.shard_map(function, in_specs=P(rows), out_specs=P(rows), check_vma=False)
    return divide(mapped(logits, *arrays))


def gather(loaded: Loaded) -> Loaded:
    """The parameters gathered over the axes that divide rows, still divided over the others: decoding then moves none."""
    leaves, structure = jax.tree.flatten(loaded)
    new = dict(enumerate(jax.tree.leaves(gathered_places(loaded))))
    moved = [i for i, place in new.items() if not place.is_equivalent_to(leaves[i].sharding, leaves[i].ndim)]
    if not moved:
        return loaded
    arrays = jax.jit(lambda x: x, out_shardings=[new[i] for i in moved])([leaves[i] for i in moved])
    for i, array in zip(moved, arrays, strict=True):
        leaves[i] = array
    return jax.tree.unflatten(structure, leaves).replace(gathered=True)


def gathered_places(loaded: Loaded) -> Loaded:
    """The tree of `NamedSharding` that `gather` brings about; of arrays, or of shapes with shardings.

    The stacked layers, which decoding does not read, stay where they are.
    """

    def place(path, x):
        if jax.tree_util.DictKey("layers") in path:
            return x.sharding
        kept = (
            tuple(axis for axis in axes.names(entry) if axis not in axes.TOKENS) or None for entry in x.sharding.spec
        )
        return NamedSharding(x.sharding.mesh, P(*kept))

    return jax.tree_util.tree_map_with_path(place, loaded)
