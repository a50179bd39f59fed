"""The device mesh, and which axis of each array lies along which axis of it.

Two small tables say it all. `PARAMETERS` gives the axes of a parameter their logical names by the end of its path;
`RULES` puts logical names on mesh axes. Optimizer moments repeat the parameters' paths and so follow them. A batch is
divided over data and fsdp together, and within the program its tokens along each row over sequence; fsdp and sequence
also divide the parameters, so that each device holds a part and gathers the rest layer by layer (ZeRO 3).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import axes, schema
from jaxrl_llm import config as configs
from jaxrl_llm.ops.token_stats import Layout
from jaxrl_llm.parallel.array_names import path_names

BATCH = PartitionSpec(axes.ROWS)

Logical = tuple[str | None, ...]

# Logical name of an array's axis -> mesh axes that divide it, or None.
RULES: dict[str, axes.Axes] = {
    "layers": None,
    "vocab": axes.TENSOR,
    "embed": (axes.FSDP, axes.SEQUENCE),
    "heads": axes.TENSOR,
    "kv_heads": axes.TENSOR,
    "mlp": axes.TENSOR,
    "experts": axes.EXPERT,
}

# Last names of a parameter's path -> logical names of its last axes; the layers' leading axis needs no mention.
PARAMETERS: dict[tuple[str, ...], Logical] = {
    ("embedding",): ("vocab", "embed"),
    ("head",): ("embed", "vocab"),
    ("query", "kernel"): ("embed", "heads"),
    ("key", "kernel"): ("embed", "kv_heads"),
    ("value", "kernel"): ("embed", "kv_heads"),
    ("out", "kernel"): ("heads", "embed"),
    ("query", "bias"): ("heads",),
    ("key", "bias"): ("kv_heads",),
    ("value", "bias"): ("kv_heads",),
    ("gate", "kernel"): ("embed", "mlp"),
    ("up", "kernel"): ("embed", "mlp"),
    ("down", "kernel"): ("mlp", "embed"),
    ("experts", "gate", "kernel"): ("experts", "embed", "mlp"),
    ("experts", "up", "kernel"): ("experts", "embed", "mlp"),
    ("experts", "down", "kernel"): ("experts", "mlp", "embed"),
    ("router",): ("embed", None),
    ("output_gate", "kernel"): ("embed", "heads"),
    ("shared_gate", "kernel"): ("embed", None),
    ("qkv", "kernel"): ("embed", None),
    ("beta", "kernel"): ("embed", None),
    ("decay", "kernel"): ("embed", None),
}


def create_mesh(config: "configs.Mesh", devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of the configured sizes over all devices, laid along the links of a TPU slice where there are any.

    Args:
      config: the sizes of `axes.NAMES`; one of them may be -1, which takes the devices that the others leave.
      devices: all of them by default.

    Raises:
      ValueError: the sizes do not fit the devices; names the field.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {axis: getattr(config, axis) for axis in axes.NAMES}
    for axis, size in sizes.items():
        schema.require(size == -1 or size > 0, f"config.mesh.{axis}", size, "positive, or -1 for the rest")
    free = [axis for axis, size in sizes.items() if size == -1]
    for axis in free[1:]:
        schema.require(False, f"config.mesh.{axis}", -1, f"positive: config.mesh.{free[0]} takes the rest already")
    rest = len(devices)
    for axis, size in sizes.items():
        if size != -1:
            right = f"a divisor of the {rest} devices" + (
                "" if rest == len(devices) else " that the axes before it leave"
            )
            schema.require(rest % size == 0, f"config.mesh.{axis}", size, right)
            rest //= size
    if free:
        sizes[free[0]] = rest
    elif rest != 1:
        product = " x ".join(map(str, sizes.values()))
        raise ValueError(
            f"config.mesh ({' x '.join(axes.NAMES)} = {product}) uses {len(devices) // rest} of {len(devices)} devices;"
            " set one size to -1"
        )
    shape = tuple(sizes.values())
    return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), axes.NAMES)


def reading_mesh(config: "configs.Mesh") -> Mesh:
    """A mesh to read a finished run on: the run's own, or all devices over fsdp where that does not fit this machine's."""
    try:
        return create_mesh(config)
    except ValueError:
        return create_mesh(dataclasses.replace(config, data=1, fsdp=-1, sequence=1, tensor=1, expert=1))


def data_shards(mesh: Mesh) -> int:
    """Parts into which a batch's rows are divided."""
    return axes.parts(mesh, axes.ROWS)


def column_shards(mesh: Mesh) -> int:
    """Parts into which a row's tokens are divided."""
    return axes.parts(mesh, axes.SEQUENCE)


def partition_spec(
    logical: Logical, shape: Sequence[int], mesh: Mesh, rules: Mapping[str, axes.Axes] = RULES
) -> PartitionSpec:
    """Which mesh axes divide each axis of an array.

    An axis whose size its mesh axes do not divide stays whole, and so does one whose mesh axes divide an earlier axis
    already. Of several mesh axes the first ones are taken, as many as divide the size.

    Args:
      logical: names of the last axes of the array; those before them stay whole.
      shape: of the array.
      mesh: the mesh.
      rules: logical name -> mesh axes or None; no mesh axis is in two different entries.

    Raises:
      ValueError: more names than axes, or an unknown name; names it.
    """
    if len(logical) > len(shape):
        raise ValueError(f"{len(logical)} logical axes {logical} for an array of shape {tuple(shape)}")
    names = (None,) * (len(shape) - len(logical)) + tuple(logical)
    spec: list[axes.Axes] = []
    for name, size in zip(names, shape, strict=True):
        wanted = None if name is None else schema.choose(rules, name, "logical axis")
        spec.append(None if wanted in spec else axes.even(size, mesh, wanted))
    return PartitionSpec(*spec)


def shardings(tree: Any, mesh: Mesh, parameters: Mapping[tuple[str, ...], Logical] = PARAMETERS) -> Any:
    """NamedSharding for every array of a parameter tree, or of a tree that repeats its paths (optimizer moments).

    Args:
      tree: arrays or shapes.
      mesh: the mesh.
      parameters: end of a path -> logical axes; the longest end that fits counts. Arrays that none fits are repeated
        on every device.

    Returns:
      The same tree of `NamedSharding`.
    """

    def place(path, leaf):
        names = path_names(path)
        # The first cut is the whole path, hence the longest end.
        ends = (names[i:] for i in range(len(names)))
        logical = next((parameters[end] for end in ends if end in parameters), ())
        if len(logical) > len(leaf.shape):
            logical = ()  # a statistic kept under the parameter's name, such as a factored moment
        return NamedSharding(mesh, partition_spec(logical, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, tree)


def parameter_table(axes: Any) -> dict[tuple[str, ...], Logical]:
    """The table that `shardings` reads, from a tree that holds each parameter's logical axes as a tuple.

    Args:
      axes: a tree of the parameters' structure whose leaves are tuples of names and None.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(axes, is_leaf=lambda x: type(x) is tuple)
    return {path_names(path): logical for path, logical in leaves}


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp."""
    return NamedSharding(mesh, BATCH)


def spread(batch: Any, mesh: Mesh) -> Any:
    """A batch with its rows over the mesh."""
    return put(batch, batch_sharding(mesh))


def token_layout(mesh: Mesh) -> Layout | None:
    """How `token_stats` finds tokens and vocabulary on the mesh; None where nothing is divided."""
    return None if mesh.size == 1 else Layout(mesh)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def placed(shapes: Any, shardings: Any) -> Any:
    """A tree of shapes that also says where each array is to lie: what a restore or a compilation ahead of time needs.

    Args:
      shapes: arrays or shapes.
      shardings: a tree of them.
    """
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, shardings)


def describe(tree: Any, mesh: Mesh) -> Any:
    """The shapes of a tree of arrays (or shapes), placed as `shardings` says."""
    return placed(tree, shardings(tree, mesh))


def create(init: Callable[..., Any], mesh: Mesh, *args: Any) -> Any:
    """`init(*args)`, each array of it made where it is to lie: no device ever holds the whole."""
    return jax.jit(init, out_shardings=shardings(jax.eval_shape(init, *args), mesh))(*args)


def put(tree: Any, shardings: Any) -> Any:
    """Arrays placed as told. With several processes each one holds the whole value and keeps its part.

    Args:
      tree: arrays of NumPy or jax, of this process alone or divided already.
      shardings: one for all, or a tree of them.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)

    def place(value, sharding):
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return jax.device_put(value, sharding)
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(place, tree, shardings)
