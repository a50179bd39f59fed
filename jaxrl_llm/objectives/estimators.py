"""Advantage estimators from outside the package, by name or import path."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import plugins, schema

# The package's own, which `learning.advantages` and the critic compute.
OWN = frozenset({"group", "rloo", "reinforce_plus_plus", "gae"})


@dataclasses.dataclass(frozen=True)
class Estimator:
    """One row of the table.

    Attributes:
      function: (rewards float32 [B], NaN where the grader failed; group_ids int32 [B]; num_groups, static; **settings) ->
        float32 [B].
      grouped: whether rewards are compared within groups only, so that a group of equal rewards teaches nothing.
    """

    function: Callable[..., jax.Array]
    grouped: bool = False


# name -> estimator, those that decorators registered.
ESTIMATORS: dict[str, Estimator] = {}


def advantage_estimator(name: str, *, grouped: bool = False) -> Callable[[Callable], Callable]:
    """Decorator that registers an advantage estimator under `name`; see `Estimator` for its signature."""

    def mark(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        field = f"advantage estimator {name!r}"
        schema.require(name not in OWN | {"default"}, field, name, "a name that the package does not use itself")
        plugins.settings(function, field, arguments=3)
        plugins.register(ESTIMATORS, name, Estimator(function, grouped), function, "advantage estimator")
        return function

    return mark


def find(name: str) -> Estimator:
    """The estimator of that name or import path, none of the package's own.

    Raises:
      ValueError: there is none; names the choices.
    """
    field = "config.advantage.name"
    if plugins.is_path(name):
        function = plugins.resolve(name, field)
        return next((row for row in ESTIMATORS.values() if row.function is function), Estimator(function))
    if name not in ESTIMATORS:
        choices = sorted({"default", *OWN, *ESTIMATORS})
        raise ValueError(f"{field} is {name!r}; choose from: {', '.join(choices)}, or an import path module:name")
    return ESTIMATORS[name]


def build(name: str, settings: Mapping[str, Any]) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    """The estimator with its settings, checked on a traced batch of two groups of two.

    Raises:
      ValueError: a setting that does not fit, or an answer of another shape or dtype; says what is right.
    """
    row = find(name)
    cls = plugins.settings(row.function, "config.advantage.name", arguments=3)
    values = plugins.values(schema.read(cls, settings, "config.advantage.settings"))

    def estimate(rewards, group_ids, num_groups):
        return row.function(rewards, group_ids, num_groups, **values)

    size, what = 4, f"advantage estimator {name!r}"
    rewards, groups = jax.ShapeDtypeStruct((size,), jnp.float32), jax.ShapeDtypeStruct((size,), jnp.int32)
    try:
        answer = jax.eval_shape(functools.partial(estimate, num_groups=2), rewards, groups)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{what} fails on {size} rewards: {type(error).__name__}: {reason}") from error
    shape, dtype = getattr(answer, "shape", None), getattr(answer, "dtype", None)
    if shape != (size,) or dtype != jnp.float32:
        got = type(answer).__name__ if shape is None else f"shape {shape} and dtype {dtype}"
        raise ValueError(f"{what} returns {got} for {size} rewards; it must be float32 [{size}]")
    return estimate
