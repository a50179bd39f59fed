"""The device mesh, and which axis of each array lies along which axis of it.

Parameters carry logical axis names by their place in the decoder; the rules below map them to mesh axes. A batch is
divided over data and fsdp together.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.training import config as configs

AXES = ("data", "fsdp", "tensor", "expert")
BATCH = PartitionSpec(("data", "fsdp"))

# Last path names of a parameter -> mesh axes of its trailing dimensions (a leading layers axis is never divided).
RULES: dict[tuple[str, ...], tuple[str | None, ...]] = {
    ("embedding",): ("tensor", "fsdp"),
    ("head",): ("fsdp", "tensor"),
    ("out", "kernel"): ("tensor", "fsdp"),
    ("down", "kernel"): ("tensor", "fsdp"),
    ("kernel",): ("fsdp", "tensor"),
    ("bias",): ("tensor",),
    ("scale",): (None,),
}


def create_mesh(config: "configs.Mesh", devices: list[Any] | None = None) -> Mesh:
    """The mesh of the configured sizes over all devices.

    Raises:
      ValueError: the sizes do not multiply to the number of devices; names the fields.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, axis) for axis in AXES]
    free = [axis for axis, size in zip(AXES, sizes, strict=True) if size == -1]
    known = int(np.prod([size for size in sizes if size != -1]))
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes) or len(devices) % known:
        raise ValueError(
            f"config.mesh {dict(zip(AXES, sizes, strict=True))} does not fit {len(devices)} devices: sizes are positive, one"
            " may be -1 for the rest, and their product must divide the number of devices"
        )
    if not free and known != len(devices):
        raise ValueError(f"config.mesh uses {known} of {len(devices)} devices; set one of its sizes to -1")
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    return Mesh(np.array(devices).reshape(sizes), AXES)


def data_shards(mesh: Mesh) -> int:
    """Parts into which a batch is divided."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def shardings(tree: Any, mesh: Mesh) -> Any:
    """NamedSharding for every array of a parameter tree, or of a tree that repeats it (optimizer moments).

    An axis that its mesh axis does not divide stays whole.
    """

    def one(path, leaf):
        names = tuple(str(getattr(key, "key", getattr(key, "name", ""))) for key in path)
        names = tuple(name for name in names if name != "value")
        for rule, axes in RULES.items():
            if names[-len(rule) :] == rule and len(leaf.shape) >= len(axes):
                lead = (None,) * (len(leaf.shape) - len(axes))
                spec = (*lead, *axes)
                fits = [a if a and n % mesh.shape[a] == 0 else None for a, n in zip(spec, leaf.shape, strict=True)]
                return NamedSharding(mesh, PartitionSpec(*fits))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(one, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())
