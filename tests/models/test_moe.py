"""Mixture of experts: Qwen3-MoE against transformers, routing replay, router load, and experts divided over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxrl_llm import objectives
from jaxrl_llm.config import Mesh as MeshConfig
from jaxrl_llm.experience import batches
from jaxrl_llm.learning import optimizer as optimizers
from jaxrl_llm.learning.step import Forward, TrainStep
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.config import ModelConfig, MoEConfig
from jaxrl_llm.models.moe import route, router_load
from jaxrl_llm.ops.fp8 import Fp8Sites
from jaxrl_llm.parallel import sharding
from jaxrl_llm.rollout.emulate import quantize_weights
from jaxrl_llm.rollout.sampler import Sampler, SamplingConfig
from jaxrl_llm.types import TrainState
from tests import tiny
from tests.models import reference

# (heads, key-value heads, head_dim), then the mixture.
CASES = {
    "one_active_raw_gates": ((4, 2, 8), MoEConfig(4, 1, 12, norm_topk_prob=False)),
    "three_active_normalised": ((3, 1, 10), MoEConfig(5, 3, 8, norm_topk_prob=True)),
    "three_active_raw_gates_dense_layer_first": ((4, 4, 6), MoEConfig(5, 3, 8, False, dense_layers=(0,))),
}


def qwen3_moe(name):
    """The same random model in transformers and here."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    (heads, kv_heads, head_dim), moe = CASES[name]
    torch.manual_seed(0)
    theirs = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=31,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
            tie_word_embeddings=False,
            num_experts=moe.num_experts,
            num_experts_per_tok=moe.experts_per_token,
            moe_intermediate_size=moe.intermediate_size,
            norm_topk_prob=moe.norm_topk_prob,
            mlp_only_layers=list(moe.dense_layers),
        )
    ).eval()
    for parameter in theirs.parameters():  # norms of 1 and a router of nearly equal logits would hide mistakes
        parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
    config = ModelConfig(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        moe=moe,
    )
    return theirs, config, *reference.params_like(config, theirs.state_dict())


@pytest.mark.parametrize("name", sorted(CASES))
def test_logits_and_every_gradient_equal_transformers(name):
    theirs, config, graphdef, params = qwen3_moe(name)
    reference.compare(theirs, config, graphdef, params)


def small(**changes):
    """(config, graphdef, params) of a tiny mixture with one expert per token more than a coin toss decides."""
    return tiny.decoder(moe=MoEConfig(**({"num_experts": 4, "experts_per_token": 2, "intermediate_size": 8} | changes)))


@pytest.fixture(scope="module")
def routed():
    """Tokens, their final hidden states and the experts that the routers choose for them."""
    config, graphdef, params = small()
    inputs = tiny.left_padded([9, 5], 9, 19)
    forward = jax.jit(lambda p, *a, **k: nnx.merge(graphdef, p).hidden_and_routing(*a, **k))
    tokens, mask, positions, segments = inputs
    return forward, params, (tokens, positions, segments), mask, *forward(params, tokens, positions, segments)


def test_decode_with_the_cache_equals_the_whole_forward_and_records_the_same_experts(routed):
    _, params, (tokens, positions, _), mask, hidden, experts = routed
    config, graphdef, _ = small()

    @jax.jit
    def pieces(params):
        model, cache, parts = nnx.merge(graphdef, params), caches.init_cache(config, 2, 6, record_routing=True), []
        for start, end in ((0, 6), (6, 7), (7, 9)):
            cache = caches.grow(cache, max(end, cache.length))
            part = slice(start, end)
            h, cache = model.decode(tokens[:, part], positions[:, part], cache, jnp.int32(start), mask[:, part])
            parts.append(h)
        return jnp.concatenate(parts, axis=1), cache.routed_experts

    got, recorded = pieces(params)
    np.testing.assert_allclose(np.asarray(got)[mask], np.asarray(hidden)[mask], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(recorded)[mask], np.asarray(experts)[mask])
    assert experts.shape == (2, 9, 2, 2)


def test_replayed_experts_are_used_and_the_routers_own_choice_replayed_changes_nothing(routed):
    forward, params, inputs, mask, hidden, experts = routed
    same, used = forward(params, *inputs, routed_experts=experts)
    np.testing.assert_allclose(np.asarray(same)[mask], np.asarray(hidden)[mask], atol=1e-6)
    other, used = forward(params, *inputs, routed_experts=(experts + 1) % 4)
    np.testing.assert_array_equal(used, (experts + 1) % 4)
    assert np.abs(np.asarray(other) - np.asarray(hidden))[mask].max() > 0.1


def test_gates_of_replayed_experts_are_the_trainers_own():
    logits = jnp.log(jnp.array([[0.5, 0.2, 0.2, 0.1]]))
    gates, experts = route(logits, 2, False, jnp.array([[3, 0]]))
    np.testing.assert_allclose(gates, [[0.1, 0.5]], rtol=1e-6)
    assert experts.tolist() == [[3, 0]]
    np.testing.assert_allclose(route(logits, 2, True, jnp.array([[3, 0]]))[0], [[1 / 6, 5 / 6]], rtol=1e-6)
    np.testing.assert_allclose(route(logits, 1, False)[0], [[0.5]], rtol=1e-6)
    slope = jax.grad(lambda x: route(x, 2, False, jnp.array([[3, 0]]))[0][0, 0])(logits)
    np.testing.assert_allclose(slope, [[-0.05, -0.02, -0.02, 0.09]], atol=1e-6)  # softmax: p_i (1[i = 3] - p_3)


def test_router_load_counts_what_the_mask_counts():
    experts = np.array([[[[0, 1], [2, 2]], [[0, 2], [1, 0]], [[3, 3], [3, 3]]]])  # one row, 3 tokens, 2 layers
    load = router_load(experts, np.array([[True, True, False]]), 4)
    np.testing.assert_allclose(load, [[0.5, 0.25, 0.25, 0], [0.25, 0.25, 0.5, 0]])
    np.testing.assert_array_equal(router_load(experts, np.zeros((1, 3), bool), 4), np.zeros((2, 4)))


def test_experts_divided_over_devices_equal_one_device():
    config, graphdef, params = tiny.decoder(num_layers=1, moe=MoEConfig(4, 2, 8))
    tokens, mask, positions, segments = tiny.left_padded([6, 3, 6, 5], 6, 19)

    @jax.jit
    def loss(params, tokens, positions, segments):
        hidden, _ = nnx.merge(graphdef, params).hidden_and_routing(tokens, positions, segments)
        return jnp.sum(jnp.where(segments[..., None] > 0, jnp.tanh(hidden), 0.0)), hidden

    step = jax.value_and_grad(loss, has_aux=True)
    (_, alone), gradient = step(params, tokens, positions, segments)
    mesh = sharding.create_mesh(MeshConfig(data=1, fsdp=2, tensor=2, expert=2))
    places = sharding.shardings(params, mesh)
    placed = sharding.put(params, places)
    kernel = placed["layers"]["feed_forward"]["experts"]["up"]["kernel"][...]
    assert kernel.addressable_shards[0].data.shape == (1, 2, 16, 4)
    with jax.set_mesh(mesh):
        batch = sharding.put((tokens, positions, segments), sharding.batch_sharding(mesh))
        (_, together), divided = jax.jit(step, out_shardings=(None, places))(placed, *batch)
    np.testing.assert_allclose(np.asarray(together)[mask], np.asarray(alone)[mask], atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), divided, gradient)


def test_sampled_routing_is_replayed_by_a_training_step():
    config, graphdef, params = small()
    sampler = Sampler(graphdef, config, SamplingConfig(5, (2,), capture_routing=True))
    rollout = sampler(params, [[1, 5, 6], [1, 4, 3, 3, 7]], jax.random.key(0), group_size=2)
    batch = batches.from_rollout(rollout, jnp.array([1.0, 0.5, -1.0, -2.0]))
    assert batch.routed_experts.shape == (4, 11, 2, 2)
    step = TrainStep(Forward(graphdef, config.vocab_size), objectives.build({"name": "grpo"}), optax.sgd(10.0))
    state = TrainState(jnp.int32(0), params, optimizers.init(step.optimizer, params), jnp.int32(0))

    @jax.jit
    def run(state, batch):
        return step.forward(state.params, batch), *step(state, batch)

    stats, new, metrics = run(state, batch)
    mask = np.asarray(batch.response_mask)
    np.testing.assert_allclose(np.asarray(stats.logprobs)[mask], np.asarray(rollout.behavior_logprobs)[mask], atol=2e-5)
    other, _, _ = run(state, batch.replace(routed_experts=3 - batch.routed_experts))
    assert np.abs(other.logprobs - stats.logprobs)[mask].max() > 1e-2  # the step follows the record
    np.testing.assert_allclose(np.asarray(stats.router_load).sum(axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(metrics["router/max_load"].numerator, 4 * np.max(stats.router_load), rtol=1e-5)
    assert int(new.skipped) == 0
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), new.params, params)
    assert all(change > 0 for change in jax.tree.leaves(moved["layers"]["feed_forward"]))


def test_fp8_weights_round_the_experts_and_not_the_router():
    _, _, params = small()
    rounded = quantize_weights(params, Fp8Sites(weights="e4m3"))["layers"]["feed_forward"]
    kept = params["layers"]["feed_forward"]
    assert np.abs(rounded["experts"]["up"]["kernel"][...] - kept["experts"]["up"]["kernel"][...]).max() > 1e-3
    np.testing.assert_array_equal(rounded["router"][...], kept["router"][...])


def test_layers_take_turns_as_the_config_says():
    kinds = lambda **moe: [k.feed_forward for k in ModelConfig(num_layers=4, moe=MoEConfig(4, 2, **moe)).layer_kinds]  # noqa: E731
    assert kinds(sparse_step=2) == ["dense", "moe", "dense", "moe"]
    assert kinds(dense_layers=(0, 3)) == ["dense", "moe", "moe", "dense"]
    assert ModelConfig(num_layers=4, moe=MoEConfig(4, 2, sparse_step=2)).period == 2
    assert ModelConfig(num_layers=4, moe=MoEConfig(4, 2, dense_layers=(1,))).period == 4
    assert ModelConfig(num_layers=4).num_moe_layers == 0


def test_bad_mixtures_are_named():
    with pytest.raises(ValueError, match="model.moe.experts_per_token is 5; it must be between 1 and num_experts = 4"):
        MoEConfig(num_experts=4, experts_per_token=5)
    with pytest.raises(ValueError, match=r"model.moe.dense_layers is \(9,\)"):
        ModelConfig(moe=MoEConfig(4, 2, dense_layers=(9,)))
    config, graphdef, params = tiny.decoder()
    with pytest.raises(ValueError, match="capture_routing is True; it must be False: the model has no experts"):
        Sampler(graphdef, config, SamplingConfig(4, (2,), capture_routing=True))(params, [[1]], jax.random.key(0))
