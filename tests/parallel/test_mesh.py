"""On every mesh the same loss, gradient, update and tokens as on one device; and each device does its share of the work."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.config import Mesh as MeshConfig
from jaxrl_llm.config import Optimizer
from jaxrl_llm.learning import optimizer as optimizers
from jaxrl_llm.learning.step import Forward, TrainStep
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.parallel.array_names import flatten
from jaxrl_llm.plan import hlo
from jaxrl_llm.records.metrics import reduce_updates
from jaxrl_llm.rollout import placement, slots
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.rollout.slots import SamplingConfig
from jaxrl_llm.types import Batch, TopKView, TrainState
from tests import tiny

MODELS = {
    "dense": {"vocab_size": 24, "num_layers": 1, "num_kv_heads": 4, "tie_word_embeddings": False},
    "experts": {
        "vocab_size": 24,
        "num_layers": 1,
        "moe": MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=16),
    },
}
MESHES = {
    "1x8": ("dense", {"data": 1, "fsdp": 8}),
    "2x4": ("dense", {"data": 2, "tensor": 4}),
    "2x2x2": ("dense", {"data": 2, "fsdp": 2, "tensor": 2}),
    "experts": ("experts", {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2}),
    "sequence": ("dense", {"data": 2, "sequence": 2, "tensor": 2}),
    "experts and sequence": ("experts", {"data": 1, "fsdp": 2, "sequence": 2, "expert": 2}),
}
PROMPTS = [[1, 5, 6, 7], [1, 4], [1, 9, 9, 9], [4, 4], [7, 8, 9], [3]]
SAMPLING = SamplingConfig(max_response_length=8, stop_ids=(2, 5, 11), capture_top_k=3, first_chunk=8, slots=16)


# The quick ones divide everything that there is to divide. Rows have 9 tokens, which no axis divides.
QUICK = ("experts", "experts and sequence")
cases = pytest.mark.parametrize(
    ("name", "sizes"),
    [pytest.param(*MESHES[m], id=m, marks=[] if m in QUICK else [pytest.mark.slow]) for m in MESHES],
)


def one_device():
    return sharding.create_mesh(MeshConfig(), jax.devices()[:1])


def make_batch(rows=16, prompt=4, length=5, vocab=24):
    rng = np.random.default_rng(3)
    response = np.arange(length) < rng.integers(1, length + 1, rows)[:, None]
    mask = np.concatenate([np.ones((rows, prompt), bool), response], axis=1)
    ids = np.argsort(rng.random((rows, length, vocab)), axis=-1)[..., :3]
    return Batch(
        tokens=rng.integers(3, vocab, mask.shape).astype(np.int32),
        positions=np.cumsum(mask, axis=1, dtype=np.int32) - 1,
        segment_ids=mask.astype(np.int32),
        response_mask=response,
        behavior_logprobs=rng.uniform(-4, -0.1, response.shape).astype(np.float32),
        advantages=rng.normal(size=response.shape).astype(np.float32),
        topk=TopKView(ids.astype(np.int32), np.full(ids.shape, np.log(0.2), np.float32)),
    )


def learn(name, mesh):
    """Loss, Adam's first moment (a tenth of the gradient) and updated parameters of one step on `mesh`."""
    config, graphdef, params = tiny.decoder(**MODELS[name])
    dense = name == "dense"
    loss = objectives.build({"name": "pdm" if dense else "drpo"})
    forward = Forward(graphdef, config.vocab_size, entropy=dense, topk=dense, layout=sharding.token_layout(mesh))
    # An eps far above rounding: Adam divides by the gradient's size, whatever that is.
    optimizer = optimizers.create(Optimizer(learning_rate=0.1, eps=1e-3, max_grad_norm=0.0), 1)
    params = sharding.put(params, sharding.shardings(params, mesh))
    moments = optimizers.init_on(mesh, optimizer, params)
    zero = sharding.put(np.int32(0), sharding.replicated(mesh))
    state = TrainState(zero, params, moments, zero)
    places = jax.tree.map(lambda x: x.sharding, state)
    with jax.set_mesh(mesh):
        step = TrainStep(forward, loss, optimizer, micro_batches=2 if dense else 1)
        # The programs run once: compiling them is what takes time.
        step = jax.jit(step, out_shardings=(places, None), compiler_options={"xla_backend_optimization_level": 0})
        state, metrics = step(state, sharding.put(make_batch(), sharding.batch_sharding(mesh)))
    return reduce_updates([metrics]), {k: np.asarray(v) for k, v in flatten((state.params, state.opt_state)).items()}


def sample(name, mesh):
    config, graphdef, params = tiny.decoder(**MODELS[name])
    sampling = dataclasses.replace(SAMPLING, capture_routing=name == "experts")
    params = sharding.put(params, sharding.shardings(params, mesh))
    return Sampler(graphdef, config, sampling)(params, PROMPTS, jax.random.key(0), group_size=4)


learn_alone = functools.cache(lambda name: learn(name, one_device()))
sample_alone = functools.cache(lambda name: sample(name, one_device()))


@cases
def test_a_step_is_that_of_one_device(name, sizes):
    values, arrays = learn(name, sharding.create_mesh(MeshConfig(**sizes)))
    expected, wanted = learn_alone(name)
    assert values.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(values[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
    assert arrays.keys() == wanted.keys()
    for key, value in wanted.items():
        # Sums in another order: rounding of the largest number in the array.
        scale = max(float(np.abs(value).max()), 1e-6)
        np.testing.assert_allclose(arrays[key], value, atol=2e-5 * scale, rtol=1e-5, err_msg=key)


@cases
def test_the_sampler_draws_the_tokens_of_one_device(name, sizes):
    ours, alone = sample(name, sharding.create_mesh(MeshConfig(**sizes))), sample_alone(name)
    lengths = alone.response_mask.sum(axis=1)
    assert lengths.min() < 4 and lengths.max() == 8 and len(lengths) == 24  # 16 slots: some were refilled
    for field in ("prompt_tokens", "response_tokens", "response_mask", "finish_reason", "routed_experts"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(alone, field), err_msg=field)
    np.testing.assert_array_equal(ours.topk.ids, alone.topk.ids)
    np.testing.assert_allclose(ours.behavior_logprobs, alone.behavior_logprobs, atol=1e-5)


def test_each_device_decodes_rows_and_heads_of_its_own():
    config, graphdef, params = tiny.decoder(**MODELS["dense"])
    flops = {}
    for devices, sizes in ((1, {}), (8, {"data": 2, "fsdp": 2, "tensor": 2})):
        mesh = sharding.create_mesh(MeshConfig(**sizes), jax.devices()[:devices])
        placed = sharding.put(params, sharding.shardings(params, mesh))
        loaded = Sampler(graphdef, config, SAMPLING).load(placed)
        assert loaded.gathered == (devices > 1)
        with jax.set_mesh(mesh):
            rows = slots.empty(config, 16, 12, 4)
            program = slots.decode.lower(graphdef, SAMPLING, loaded, rows, np.int32(8), np.int32(16), 8).compile()
        costs = hlo.costs(program.as_text())
        flops[devices] = costs.flops
    assert rows.cache.layers[0].keys.sharding.shard_shape((16, 4, 8, 12)) == (4, 2, 8, 12)
    assert rows.done.sharding.shard_shape((16,)) == (4,)
    assert flops[8] == flops[1] / 8
    kernel = loaded.layers[0]["feed_forward"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (24, 32)  # whole along fsdp, halved along tensor; transposed
    # No parameter is sent while decoding, and no logits but to the device that draws: less than a layer's smallest matrix.
    assert sum(costs.collective_bytes.values()) < 4 * 32 * 32
    assert costs.collective_bytes["all-to-all"] == 4 * 4 * 24 / 4  # half of the 4 x 12 logits of two


def test_without_gathering_the_parameters_stay_divided_as_in_training():
    config, graphdef, params = tiny.decoder(**MODELS["dense"])
    mesh = sharding.create_mesh(MeshConfig(data=1, fsdp=8))
    placed = sharding.put(params, sharding.shardings(params, mesh))
    loaded = Sampler(graphdef, config, dataclasses.replace(SAMPLING, gather_params=False)).load(placed)
    kernel = loaded.layers[0]["feed_forward"]["up"]["kernel"]
    assert not loaded.gathered and kernel.sharding.shard_shape(kernel.shape) == (48, 4)
    gathered = placement.gather(loaded)
    assert gathered.layers[0]["feed_forward"]["up"]["kernel"].sharding.is_fully_replicated
    stack = gathered.params["layers"]["feed_forward"]["up"]["kernel"][...]
    assert stack.sharding.shard_shape(stack.shape) == (1, 4, 48)  # decoding does not read it
    np.testing.assert_array_equal(
        np.asarray(gathered.layers[0]["feed_forward"]["up"]["kernel"]).T, jnp.asarray(stack)[0]
    )


@pytest.mark.parametrize(("rows", "heads", "spec"), [(16, 4, (8, 2)), (5, 4, (5, 2)), (16, 3, (8, 3))])
def test_rows_and_heads_that_do_not_divide_stay_whole(rows, heads, spec):
    config = tiny.decoder(num_heads=12, num_kv_heads=heads)[0]
    mesh = sharding.create_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(functools.partial(slots.empty, config, rows, 4, 4))
    keys = placement.specs(shapes, mesh).cache.layers[0].keys
    shard = jax.sharding.NamedSharding(mesh, keys).shard_shape(shapes.cache.layers[0].keys.shape)
    assert (shard[0], shard[1]) == spec
