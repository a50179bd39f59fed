"""Names of the arrays in a tree, as people write them: `layers/attention/query/kernel`."""

from collections.abc import Sequence
from typing import Any

import jax


def path_names(path: Sequence[Any]) -> tuple[str, ...]:
    """Names along a path of `jax.tree_util`, without the wrapper that flax puts around an array."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name in ("value", "raw_value"):
        path = path[:-1]
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def flatten(tree: Any) -> dict[str, Any]:
    """The arrays of a tree under their names, in its order.

    Raises:
      ValueError: two arrays of one name.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    flat: dict[str, Any] = {}
    for path, leaf in leaves:
        name = "/".join(path_names(path))
        if name in flat:
            raise ValueError(f"two arrays of the tree are called {name!r}")
        flat[name] = leaf
    return flat
