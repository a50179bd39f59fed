"""The mesh and the division of parameters, moments and batches over it, on eight host devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxrl_llm.config import Mesh as MeshConfig
from jaxrl_llm.models.abstract import abstract
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.parallel import sharding
from jaxrl_llm.parallel.array_names import flatten

EMBED = ("fsdp", "sequence")  # divide the width of the residual stream
TINY = ModelConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    attention_bias=True,
    tie_word_embeddings=False,
)


def mesh(**sizes):
    return sharding.create_mesh(MeshConfig(**sizes))


def make_params():
    return nnx.split(Decoder(TINY, rngs=nnx.Rngs(0)), nnx.Param)[1]


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (8, 1, 1, 1, 1)),
        ({"fsdp": 4}, (2, 4, 1, 1, 1)),
        ({"data": 1, "fsdp": -1, "tensor": 2}, (1, 4, 1, 2, 1)),
        ({"data": 1, "fsdp": 2, "sequence": -1}, (1, 2, 4, 1, 1)),
        ({"data": 2, "fsdp": 2, "tensor": 1, "expert": 2}, (2, 2, 1, 1, 2)),
        ({"data": -1, "fsdp": 8}, (1, 8, 1, 1, 1)),
    ],
)
def test_mesh(sizes, shape):
    made = mesh(**sizes)
    assert made.axis_names == ("data", "fsdp", "sequence", "tensor", "expert")
    assert made.devices.shape == shape
    assert list(made.devices.flat) == jax.devices()
    assert sharding.data_shards(made) == shape[0] * shape[1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 3}, r"config\.mesh\.tensor is 3; it must be a divisor of the 8 devices$"),
        (
            {"fsdp": 4, "tensor": 4},
            r"config\.mesh\.tensor is 4; it must be a divisor of the 2 devices that the axes before",
        ),
        ({"tensor": 0}, r"config\.mesh\.tensor is 0; it must be positive, or -1"),
        ({"expert": -2}, r"config\.mesh\.expert is -2; it must be positive, or -1"),
        ({"fsdp": -1}, r"config\.mesh\.fsdp is -1; it must be positive: config\.mesh\.data takes the rest already"),
        (
            {"data": 2},
            r"config\.mesh \(data x fsdp x sequence x tensor x expert = 2 x 1 x 1 x 1 x 1\) uses 2 of 8 devices",
        ),
        ({"data": 16}, r"config\.mesh\.data is 16; it must be a divisor of the 8 devices"),
    ],
)
def test_mesh_that_does_not_fit_is_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        mesh(**sizes)


def test_a_run_is_read_on_whatever_devices_there_are():
    shape = dict(sharding.reading_mesh(MeshConfig(data=2, fsdp=4)).shape)
    assert (shape["data"], shape["fsdp"]) == (2, 4)
    shape = dict(sharding.reading_mesh(MeshConfig(data=1, fsdp=16, tensor=2)).shape)
    assert shape == {"data": 1, "fsdp": 8, "sequence": 1, "tensor": 1, "expert": 1}


def test_mesh_over_some_devices():
    assert sharding.create_mesh(MeshConfig(fsdp=2), jax.devices()[:4]).devices.shape == (2, 2, 1, 1, 1)


@pytest.mark.parametrize(
    ("logical", "shape", "spec"),
    [
        (("embed", "heads"), (4, 6), P(EMBED, "tensor")),
        (("embed", "heads"), (3, 4, 6), P(None, EMBED, "tensor")),
        (("embed", None), (4, 6), P(EMBED, None)),
        (("embed", "heads"), (4, 5), P(EMBED, None)),  # 2 does not divide 5
        (("experts", "embed", "mlp"), (7, 4, 6), P("expert", EMBED, "tensor")),  # one expert shard divides anything
        (("mlp", "heads"), (4, 6), P("tensor", None)),  # one mesh axis divides one axis
        (("embed", None), (3, 6), P(None, None)),
        ((), (4, 6), P(None, None)),
        ((), (), P()),
    ],
)
def test_partition_spec(logical, shape, spec):
    assert sharding.partition_spec(logical, shape, mesh(fsdp=2, tensor=2)) == spec


def test_of_several_mesh_axes_as_many_divide_as_fit():
    device_mesh = mesh(data=1, fsdp=2, sequence=2, tensor=2)
    spec = sharding.partition_spec(("embed", "mlp"), (8, 6), device_mesh)
    assert jax.sharding.NamedSharding(device_mesh, spec).shard_shape((8, 6)) == (2, 3)
    assert sharding.partition_spec(("embed", "mlp"), (6, 6), device_mesh) == P("fsdp", "tensor")
    assert sharding.data_shards(device_mesh) == 2 and sharding.column_shards(device_mesh) == 2


def test_partition_spec_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"unknown logical axis 'width'; choose from: embed, experts"):
        sharding.partition_spec(("width",), (4,), mesh())
    with pytest.raises(ValueError, match=r"2 logical axes .* for an array of shape \(4,\)"):
        sharding.partition_spec(("embed", "mlp"), (4,), mesh())


def test_every_large_parameter_is_divided_over_fsdp_and_tensor():
    places = sharding.shardings(jax.eval_shape(make_params), mesh(fsdp=2, tensor=2))
    flat = {tuple(name.split("/")): place.spec for name, place in flatten(places).items()}
    assert flat[("embedding",)] == P("tensor", EMBED)
    assert flat[("head",)] == P(EMBED, "tensor")
    assert flat[("layers", "attention", "query", "kernel")] == P(None, EMBED, "tensor")
    assert flat[("layers", "attention", "key", "bias")] == P(None, "tensor")
    assert flat[("layers", "attention", "out", "kernel")] == P(None, "tensor", EMBED)
    assert flat[("layers", "feed_forward", "down", "kernel")] == P(None, "tensor", EMBED)
    assert flat[("norm", "scale")] == P(None)
    for path, spec in flat.items():
        if path[-1] in ("kernel", "embedding", "head"):
            assert {EMBED, "tensor"} < {*spec, None}, path


def test_moments_lie_where_their_parameters_do():
    params = jax.eval_shape(make_params)
    optimizer = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 2)
    state = jax.eval_shape(optimizer.init, params)
    device_mesh = mesh(fsdp=2, tensor=2)
    wanted = jax.tree.leaves(sharding.shardings(params, device_mesh))
    places = sharding.shardings(state, device_mesh)
    assert jax.tree.structure(places) == jax.tree.structure(state)
    adam = places.inner_opt_state[1][0]
    for moments in (adam.mu, adam.nu, places.acc_grads):
        assert jax.tree.leaves(moments) == wanted
    assert adam.count.spec == P() and places.mini_step.spec == P()


def test_factored_moments_are_left_whole():
    params = {"layers": {"gate": {"kernel": jnp.zeros((128, 256))}}}
    state = jax.eval_shape(optax.adafactor(1e-3).init, params)
    places = sharding.shardings(state, mesh(fsdp=2, tensor=2))
    for leaf, place in zip(jax.tree.leaves(state), jax.tree.leaves(places), strict=True):
        place.shard_shape(leaf.shape)  # raises where a sharding does not fit


def test_a_model_may_name_its_own_axes():
    axes = {"router": {"kernel": ("embed", "experts")}, "experts": {"up": {"kernel": ("experts", "embed", "mlp")}}}
    table = sharding.parameter_table(axes)
    params = jax.tree.map(lambda a: jnp.zeros((2, *(4,) * len(a))), axes, is_leaf=lambda x: isinstance(x, tuple))
    device_mesh = mesh(data=1, fsdp=2, tensor=2, expert=2)
    places = sharding.shardings({"mu": params, "count": jnp.int32(0)}, device_mesh, table)
    assert places["mu"]["router"]["kernel"].spec == P(None, EMBED, "expert")
    assert places["mu"]["experts"]["up"]["kernel"].spec == P(None, "expert", EMBED, "tensor")
    assert places["count"].spec == P()


def test_put_and_compute_as_on_one_device():
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, jax.eval_shape(make_params))
    graphdef = abstract(Decoder, TINY)[0]
    tokens = np.arange(8 * 5, dtype=np.int32).reshape(8, 5) % 16
    positions, segments = np.tile(np.arange(5, dtype=np.int32), (8, 1)), np.ones((8, 5), np.int32)

    @jax.jit
    def hidden(params, *batch):
        return nnx.merge(graphdef, params).hidden(*batch)

    device_mesh = mesh(data=2, fsdp=2, tensor=2)
    placed = sharding.put(params, sharding.shardings(params, device_mesh))
    batch = sharding.put((tokens, positions, segments), sharding.batch_sharding(device_mesh))
    assert batch[0].sharding.shard_shape(batch[0].shape) == (2, 5)
    kernel = placed["layers"]["feed_forward"]["up"]["kernel"][...]
    assert kernel.addressable_shards[0].data.shape == (2, 8, 16)
    expected = np.asarray(hidden(sharding.put(params, jax.devices()[0]), tokens, positions, segments))
    np.testing.assert_allclose(np.asarray(hidden(placed, *batch)), expected, atol=1e-4, rtol=1e-4)
