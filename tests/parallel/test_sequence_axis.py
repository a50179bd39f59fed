"""Rows divided along their tokens (`config.mesh.sequence`): one device's results, and less memory on each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import Mesh as MeshConfig
from jaxrl_llm.learning import packing
from jaxrl_llm.learning.step import Forward
from jaxrl_llm.models.config import DeltaNetConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.parallel.array_names import flatten
from jaxrl_llm.types import Batch, Packing
from tests import tiny
from tests.learning.test_packing import make_batch, packed

MODELS = {
    "dense": {},
    "delta": {
        "layer_types": ("linear_attention", "full_attention"),
        "delta_net": DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=8, conv_size=4),
    },
}


def mesh(**sizes):
    count = int(np.prod(list(sizes.values()) or [1]))
    return sharding.create_mesh(MeshConfig(**{"data": 1} | sizes), jax.devices()[:count])


def learn(model, mesh, batch, weights):
    """A weighted sum of the log-probs and its gradient, named."""
    config, graphdef, params = tiny.decoder(**model)
    forward = Forward(graphdef, config.vocab_size, layout=sharding.token_layout(mesh))

    def loss(params, batch):
        return jnp.sum(weights * forward(params, batch).logprobs)

    params = sharding.put(params, sharding.shardings(params, mesh))
    with jax.set_mesh(mesh):
        placed = sharding.put(batch, sharding.batch_sharding(mesh))
        value, gradient = jax.jit(jax.value_and_grad(loss))(params, placed)
    return float(value), {name: np.asarray(x) for name, x in flatten(gradient).items()}


def batch_and_weights():
    batch = make_batch(np.tile([4, 3, 1, 2], 2), np.tile([6, 1, 2, 5], 2))
    weights = np.cos(np.arange(batch.response_mask.size)).reshape(batch.response_mask.shape)
    return batch, np.where(batch.response_mask, weights, 0)


@functools.cache
def alone(name):
    return learn(MODELS[name], mesh(), *batch_and_weights())


@pytest.mark.parametrize(
    ("name", "sizes", "share"),
    [
        ("dense", {"fsdp": 2, "sequence": 2, "tensor": 2}, True),
        pytest.param("dense", {"data": 2, "sequence": 4}, True, marks=pytest.mark.slow),
        pytest.param("dense", {"data": 2, "sequence": 4}, False, marks=pytest.mark.slow),  # of 10 tokens in a row
        pytest.param("delta", {"data": 2, "sequence": 2, "tensor": 2}, True, marks=pytest.mark.slow),
        pytest.param("delta", {"data": 2, "sequence": 2, "tensor": 2}, False, marks=pytest.mark.slow),
    ],
)
def test_own_and_packed_rows_learn_what_one_device_does(name, sizes, share):
    divided = mesh(**sizes)
    batch, weights = batch_and_weights()
    if share:
        batch = packed(batch, rows=2, width=16, tokens=16, shards=2)
    value, gradient = learn(MODELS[name], divided, batch, weights)
    expected, wanted = alone(name)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert gradient.keys() == wanted.keys()
    for key, x in wanted.items():
        np.testing.assert_allclose(gradient[key], x, atol=2e-5 * np.abs(x).max(), rtol=1e-4, err_msg=key)


@pytest.mark.parametrize("columns", [1, 2, 6, 32])
def test_packed_rows_divide_over_the_axis(columns):
    rng = np.random.default_rng(0)
    responses = rng.integers(1, 100, 16)
    lengths = packing.Lengths(responses + 20, responses, 192, 160)
    _, shared = packing.plan(lengths, 2, 2, attention=1e-3, columns=columns)
    assert shared.width % columns == 0 and shared.tokens % columns == 0 and shared.width % 8 == 0


@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_device_holds_its_part_of_the_activations(share):
    """Of the compiled gradient: a quarter of the temporaries, and nowhere the hidden states of whole rows."""
    prompt, response, rows, width = 512, 1536, 2, 64
    length = prompt + response
    config, graphdef, params = tiny.decoder(hidden_size=width, intermediate_size=4 * width, num_heads=2, num_kv_heads=1)
    temporaries = {}
    for parts in (1, 4):
        divided = mesh(sequence=parts)
        forward = Forward(graphdef, config.vocab_size, layout=sharding.token_layout(divided))
        array = functools.partial(_array, rows, sharding.batch_sharding(divided))
        batch = Batch(
            *[array(jnp.int32, length)] * 3,
            response_mask=array(jnp.bool_, response),
            behavior_logprobs=array(jnp.float32, response),
            advantages=array(jnp.float32, response),
            packing=Packing(array(jnp.int32), 1, 1, rows, 1, length, response + 128) if share else None,
        )
        gradient = jax.jit(jax.grad(lambda params, batch, f=forward: jnp.sum(f(params, batch).logprobs)))
        with jax.set_mesh(divided):
            placed = sharding.placed(params, sharding.shardings(params, divided))
            compiled = gradient.lower(placed, batch).compile()
        temporaries[parts] = compiled.memory_analysis().temp_size_in_bytes
        assert (f"{length},{width}]" in compiled.as_text()) == (parts == 1)
    assert temporaries[4] < 0.3 * temporaries[1]


def _array(rows, place, dtype, *shape):
    return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=place)
