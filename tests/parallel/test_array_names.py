"""Names of arrays."""

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxrl_llm.parallel.array_names import flatten
from jaxrl_llm.types import TrainState


def test_names_of_a_training_state():
    params = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
    zero = jnp.int32(0)
    state = TrainState(step=zero, params={"layers": params}, opt_state=optimizer.init(params), skipped=zero)
    assert list(flatten(state)) == [
        "step",
        "params/layers/bias",
        "params/layers/kernel",
        "opt_state/1/count",
        "opt_state/1/mu/bias",
        "opt_state/1/mu/kernel",
        "opt_state/1/nu/bias",
        "opt_state/1/nu/kernel",
        "skipped",
    ]


def test_a_module_may_be_called_value():
    assert list(flatten({"value": {"value": 1, "key": 2}})) == ["value/key", "value/value"]


def test_two_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"two arrays of the tree are called 'a/b'"):
        flatten({"a/b": 1, "a": {"b": 2}})
