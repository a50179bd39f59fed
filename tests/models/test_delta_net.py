"""The gated delta net: its chunked form against the recurrence, Qwen3.5 against transformers, decoding, packing, training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxrl_llm import objectives
from jaxrl_llm.experience import batches
from jaxrl_llm.learning import optimizer as optimizers
from jaxrl_llm.learning.step import Forward, TrainStep
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.config import DeltaNetConfig, ModelConfig, MoEConfig
from jaxrl_llm.models.delta_net import RecurrentState, causal_conv, chunked, recurrent
from jaxrl_llm.rollout.sampler import Sampler, SamplingConfig
from jaxrl_llm.types import TrainState
from tests import tiny
from tests.models import reference

LINEAR, FULL = "linear_attention", "full_attention"
CASES = {
    # 3 linear layers and a full one; odd head counts.
    "dense": (
        {"layer_types": (LINEAR, LINEAR, LINEAR, FULL), "num_heads": 3, "num_kv_heads": 1, "head_dim": 8},
        {"partial_rotary": 0.5, "delta_net": DeltaNetConfig(3, 6, 4, 5, 4), "tie_word_embeddings": True},
    ),
    # The period of two repeats, so that the scan has two steps; mixture of experts with a shared one.
    "moe": (
        {"layer_types": (LINEAR, FULL) * 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
        {
            "partial_rotary": 0.25,
            "delta_net": DeltaNetConfig(2, 2, 6, 4, 3),
            "tie_word_embeddings": False,
            "moe": MoEConfig(5, 3, 8, shared_expert_size=12),
        },
    ),
}


def qwen35(name):
    """The same random model in transformers and here."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    fields, more = CASES[name]
    config = ModelConfig(
        **fields,
        **more,
        vocab_size=31,
        hidden_size=24,
        intermediate_size=40,
        num_layers=4,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        zero_centred_norm=True,
        attention_gate=True,
    )
    moe, delta = config.moe, config.delta_net
    family = "Qwen3_5Moe" if moe.num_experts else "Qwen3_5"
    sizes = (
        {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.intermediate_size,
            "shared_expert_intermediate_size": moe.shared_expert_size,
        }
        if moe.num_experts
        else {"intermediate_size": 40}
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}TextConfig")(
            vocab_size=31,
            hidden_size=24,
            num_hidden_layers=4,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            layer_types=list(config.layer_types),
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_theta": 5000.0,
                "rope_type": "default",
                "partial_rotary_factor": config.partial_rotary,
            },
            tie_word_embeddings=config.tie_word_embeddings,
            linear_conv_kernel_dim=delta.conv_size,
            linear_key_head_dim=delta.key_head_dim,
            linear_value_head_dim=delta.value_head_dim,
            linear_num_key_heads=delta.num_key_heads,
            linear_num_value_heads=delta.num_value_heads,
            **sizes,
        )
    ).eval()
    for parameter in theirs.parameters():  # norms of 1 and a router of nearly equal logits would hide mistakes
        parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
    return theirs, config, *reference.params_like(config, theirs.state_dict())


@pytest.mark.parametrize("name", sorted(CASES))
def test_logits_and_every_gradient_equal_transformers(name):
    theirs, config, graphdef, params = qwen35(name)
    reference.compare(theirs, config, graphdef, params)


def rule_inputs(length=11):
    """q, k, v, decay, beta, starts, memory of two rows; the second one has two sequences begin in it."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, length, 3, size)) for size in (4, 4, 5))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    decay, beta = -rng.exponential(size=(2, length, 3)), rng.uniform(size=(2, length, 3))
    starts = np.zeros((2, length), bool)
    starts[1, [3, 7]] = True
    return q, k, v, decay, beta, starts, rng.normal(size=(2, 3, 4, 5))


def loop(q, k, v, decay, beta, starts, memory):
    """The recurrence written out, one row, head and token at a time."""
    memory, out = memory.copy(), np.zeros_like(v)
    for b, t, h in np.ndindex(v.shape[:3]):
        state = memory[b, h] * (0.0 if starts[b, t] else np.exp(decay[b, t, h]))
        state = state + beta[b, t, h] * np.outer(k[b, t, h], v[b, t, h] - k[b, t, h] @ state)
        out[b, t, h], memory[b, h] = q[b, t, h] @ state, state
    return out, memory


@pytest.mark.parametrize("size", [1, 4, 64])
def test_chunks_equal_the_recurrence_whatever_their_size(size):
    q, k, v, decay, beta, starts, memory = rule_inputs()
    expected = loop(q, k, v, decay, beta, starts, memory)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, decay, beta)]
    got = jax.jit(functools.partial(chunked, size=size))(*arrays, jnp.cumsum(starts, axis=1), jnp.float32(memory))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_one_token_at_a_time_and_its_gradient_equal_the_chunks():
    q, k, v, decay, beta, starts, memory = (jnp.asarray(x) for x in rule_inputs())
    arrays = [x.astype(jnp.float32) for x in (q, k, v, decay, beta, memory)]
    weights = jnp.cos(jnp.arange(v.size, dtype=jnp.float32)).reshape(v.shape)

    def steps(q, k, v, decay, beta, memory):
        def one(memory, token):
            *token, start = (x[:, None] for x in token)
            y, memory = recurrent(*token, start.astype(jnp.int32), memory)
            return memory, y[:, 0]

        memory, y = jax.lax.scan(one, memory, [jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, beta, starts)])
        return jnp.moveaxis(y, 0, 1), memory

    def chunks(q, k, v, decay, beta, memory):
        return chunked(q, k, v, decay, beta, jnp.cumsum(starts, axis=1), memory, size=4)

    def loss(rule):
        def value(arrays):
            y, memory = rule(*arrays)
            return jnp.sum(y * weights) + jnp.sum(jnp.sin(memory)), y

        return jax.jit(jax.value_and_grad(value, has_aux=True))

    ((_, a), da), ((_, b), db) = loss(steps)(arrays), loss(chunks)(arrays)
    np.testing.assert_allclose(a, b, atol=2e-5)
    for x, y in zip(da, db, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * float(jnp.abs(x).max()))


def test_the_convolution_stays_within_its_sequence_and_can_be_split():
    x, kernel = np.arange(1.0, 6.0, dtype=np.float32).reshape(1, 5, 1), np.array([[100.0], [10.0], [1.0]], np.float32)
    before = np.array([[[8.0], [9.0]]], np.float32)
    segment = np.array([[0, 0, 0, 1, 1]])  # 1, 2, 3 go on from 8, 9; then 4, 5
    y, last = causal_conv(x, kernel, segment, before)
    assert y[0, :, 0].tolist() == [891, 912, 123, 4, 45]
    assert last[0, :, 0].tolist() == [4, 5]
    head, state = causal_conv(x[:, :4], kernel, segment[:, :4], before)
    assert state[0, :, 0].tolist() == [0, 4]
    tail, state = causal_conv(x[:, 4:], kernel, np.array([[0]]), state)
    np.testing.assert_array_equal(np.concatenate([head, tail], axis=1), y)
    assert state[0, :, 0].tolist() == [4, 5]


@pytest.fixture(scope="module")
def model():
    """(config, graphdef, params) of a tiny decoder with both kinds of layers and experts."""
    return tiny.decoder(
        layer_types=(LINEAR, FULL),
        zero_centred_norm=True,
        attention_gate=True,
        partial_rotary=0.5,
        delta_net=DeltaNetConfig(2, 4, 6, 5, 3),
        moe=MoEConfig(4, 2, 8, shared_expert_size=8),
    )


@pytest.fixture(scope="module")
def hidden(model):
    _, graphdef, params = model
    forward = jax.jit(lambda p, *inputs: nnx.merge(graphdef, p).hidden(*inputs))
    return functools.partial(forward, params)


def test_decode_with_the_cache_equals_the_whole_forward(model, hidden):
    config, graphdef, params = model
    tokens, mask, positions, segments = tiny.left_padded([10, 6, 1], 10, 19)

    @jax.jit
    def pieces(params, cache):
        model, parts = nnx.merge(graphdef, params), []
        for start, end in ((0, 6), (6, 7), (7, 8), (8, 10)):
            slots = jnp.full(3, start) if start == 7 else jnp.int32(start)
            part = slice(start, end)
            h, cache = model.decode(tokens[:, part], positions[:, part], cache, slots, mask[:, part])
            cache = caches.grow(cache, 12) if end == 6 else cache
            parts.append(h)
        return jnp.concatenate(parts, axis=1)

    whole = np.asarray(hidden(tokens, positions, segments))
    empty = caches.init_cache(config, 3, 10)
    np.testing.assert_allclose(np.asarray(pieces(params, empty))[mask], whole[mask], atol=1e-5)
    # What an earlier sequence left in the recurrent states ends where the new one begins.
    stale = jax.tree.map(
        lambda x: jax.tree.map(lambda y: y + 3, x) if isinstance(x, RecurrentState) else x,
        empty,
        is_leaf=lambda x: isinstance(x, RecurrentState),
    )
    np.testing.assert_allclose(np.asarray(pieces(params, stale))[mask], whole[mask], atol=1e-5)


def test_a_repeated_and_grown_cache_keeps_its_recurrent_states(model):
    config, _, _ = model
    cache = caches.init_cache(config, 2, 4)
    cache = cache.replace(
        layers=jax.tree.map(lambda x: x + jnp.arange(2).reshape(2, *[1] * (x.ndim - 1)), cache.layers)
    )
    cache = caches.grow(caches.repeat(cache, 3), 7)
    state, attention = cache.layers
    assert state.memory.shape == (6, 4, 6, 5)
    assert state.memory[:, 0, 0, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert attention.keys.shape == (6, 2, 8, 7)


def test_sequences_of_a_packed_row_equal_the_same_sequences_alone(hidden):
    tokens, _, positions, segments = tiny.left_padded([10, 10, 10], 10, 19)
    alone = np.asarray(hidden(tokens, positions, segments))
    packed = np.concatenate([tokens[0, :3], tokens[1, :5], [0, 0]])[None].astype(np.int32)
    place = np.array([[0, 1, 2, 0, 1, 2, 3, 4, 0, 0]], np.int32)
    numbers = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 0, 0]], np.int32)
    rows = [np.repeat(x, 3, axis=0) for x in (packed, place, numbers)]
    got = np.asarray(hidden(*rows))[0]
    np.testing.assert_allclose(got[:3], alone[0, :3], atol=1e-5)
    np.testing.assert_allclose(got[3:8], alone[1, :5], atol=1e-5)
    assert np.isfinite(got).all()


def test_left_padding_changes_nothing(hidden):
    tokens, mask, positions, segments = tiny.left_padded([10, 6, 3], 10, 19)
    padded = np.asarray(hidden(tokens, positions, segments))
    roll = [
        np.stack([np.roll(row, -shift) for row, shift in zip(x, (0, 4, 7), strict=True)])
        for x in (tokens, positions, segments)
    ]
    right = np.asarray(hidden(*roll))
    for row, length in enumerate((10, 6, 3)):
        np.testing.assert_allclose(padded[row, 10 - length :], right[row, :length], atol=1e-5)
    assert np.isfinite(padded).all() and np.isfinite(right).all()


@pytest.mark.slow
def test_it_samples_and_takes_a_training_step(model):
    config, graphdef, params = model
    sampler = Sampler(graphdef, config, SamplingConfig(5, (2,), capture_routing=True))
    rollout = sampler(params, [[1, 5, 6], [1, 4, 3, 3, 7]], jax.random.key(0), group_size=2)
    batch = batches.from_rollout(rollout, jnp.array([1.0, 0.5, -1.0, -2.0]))
    step = TrainStep(Forward(graphdef, config.vocab_size), objectives.build({"name": "grpo"}), optax.sgd(10.0))
    state = TrainState(jnp.int32(0), params, optimizers.init(step.optimizer, params), jnp.int32(0))
    stats, new, _ = jax.jit(lambda s, b: (step.forward(s.params, b), *step(s, b)))(state, batch)
    mask = np.asarray(batch.response_mask)
    np.testing.assert_allclose(np.asarray(stats.logprobs)[mask], np.asarray(rollout.behavior_logprobs)[mask], atol=2e-5)
    assert int(new.skipped) == 0
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), new.params, params)
    assert all(change > 0 for change in jax.tree.leaves(moved["layers"])), moved


def test_bad_delta_nets_are_named():
    with pytest.raises(ValueError, match="model.delta_net.num_key_heads is 3; it must be a divisor of num_value_heads"):
        DeltaNetConfig(3, 4)
    with pytest.raises(ValueError, match="model.layer_types is .* it must be 4 long, or empty"):
        ModelConfig(num_layers=4, layer_types=(LINEAR,))
    with pytest.raises(ValueError, match="model.partial_rotary is 0.1"):
        ModelConfig(head_dim=32, partial_rotary=0.1)
