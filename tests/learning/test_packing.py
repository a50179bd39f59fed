"""Packed rows: what the host plans by hand and in general, and that losses, gradients and values do not notice."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxrl_llm import objectives
from jaxrl_llm.config import Mesh
from jaxrl_llm.learning import packing
from jaxrl_llm.learning.critic import Values
from jaxrl_llm.learning.step import Forward, TrainStep, score
from jaxrl_llm.models.config import DeltaNetConfig, MoEConfig
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.parallel import sharding
from jaxrl_llm.types import Batch, Packing, TopKView
from tests import tiny
from tests import tiny_runs as run

VOCAB, PROMPT, RESPONSE = 19, 4, 6


def lengths_of(prompts, responses):
    prompts, responses = np.asarray(prompts), np.asarray(responses)
    return packing.Lengths(np.where(responses > 0, prompts + responses, 0), responses, PROMPT + RESPONSE, RESPONSE)


def make_batch(prompts, responses, seed=0) -> Batch:
    """Left-padded prompts and right-padded responses; a response of 0 tokens is one of 2 that carries no loss."""
    rng = np.random.default_rng(seed)
    prompts, responses = np.asarray(prompts)[:, None], np.asarray(responses)[:, None]
    shown = np.where(responses > 0, responses, 2)
    column = np.arange(PROMPT + RESPONSE)
    real = (column >= PROMPT - prompts) & (column < PROMPT + shown)
    mask = np.arange(RESPONSE) < responses
    floats = functools.partial(rng.normal, size=mask.shape)
    ids = np.argsort(rng.random((*mask.shape, VOCAB)), axis=-1)[..., :3]
    return Batch(
        tokens=np.where(real, rng.integers(3, VOCAB, real.shape), 0).astype(np.int32),
        positions=np.maximum(np.cumsum(real, axis=1) - 1, 0).astype(np.int32),
        segment_ids=real.astype(np.int32),
        response_mask=mask,
        behavior_logprobs=(floats() - 3).astype(np.float32),
        advantages=floats().astype(np.float32),
        topk=TopKView(ids.astype(np.int32), np.log(np.full(ids.shape, 0.2, np.float32))),
        old_logprobs=(floats() - 3).astype(np.float32),
    )


def packed(batch: Batch, rows: int, width: int, tokens: int, parts: int = 1, shards: int = 1) -> Batch:
    """`batch` in a shape of our own choice, so that examples of other lengths need no other program."""
    tokens_of = packing.lengths_of(batch).tokens
    sequences = len(tokens_of) // parts // shards
    groups = tokens_of.reshape(shards, sequences, parts).swapaxes(1, 2).reshape(-1, sequences)
    offsets = [packing.first_fit(group, rows, width) for group in groups]
    offset = np.stack(offsets).reshape(shards, parts, sequences).swapaxes(1, 2).reshape(-1).astype(np.int32)
    return batch.replace(packing=Packing(offset, shards, parts, sequences, rows, width, tokens))


# ---- The host's part -------------------------------------------------------------------------------------------------


def test_first_fit_by_hand():
    # Longest first: 6 into row 0, 5 into row 1, 4 behind the 6, 3 behind the 5, 2 behind that; 0 goes nowhere.
    np.testing.assert_array_equal(packing.first_fit(np.array([4, 0, 6, 3, 5, 2]), 2, 10), [6, -1, 0, 15, 10, 18])
    assert packing.first_fit(np.array([6, 6, 6]), 2, 10) is None


def test_dealing_by_hand():
    lengths = lengths_of([1] * 8, [1, 2, 3, 4, 5, 6, 5, 4])
    # From the longest: rows 5, 4, 6, 3 to the four groups in turn, then 7, 2, 1, 0 in the other direction.
    order = packing.deal(lengths, shards=2, parts=2)
    np.testing.assert_array_equal(order, [5, 4, 0, 1, 6, 3, 2, 7])
    # Device 0 holds the first four rows, of which micro-batch 0 takes every second one.
    sums = lengths.tokens[order].reshape(2, 2, 2).sum(axis=1)
    np.testing.assert_array_equal(sums, [[9, 9], [10, 10]])


def test_a_skewed_rollout_is_padded_by_less_than_fifteen_in_a_hundred():
    """64 sequences of at most 256 tokens, in 4 micro-batches: half of them 30 tokens long, each next kind twice as long."""
    tokens = np.random.default_rng(0).permutation(np.repeat([30, 60, 120, 256], [32, 16, 8, 8]))
    needed = 32 * 30 + 16 * 60 + 8 * 120 + 8 * 256  # 4,928 of 64 x 256 slots: 70 % padding in rows of their own
    lengths = packing.Lengths(tokens, tokens - 20, 256, 236)
    order, plan = packing.plan(lengths, 1, 4, attention=1e-3)
    assert sorted(order) == list(range(64))
    assert plan.rows * plan.width <= 16 * 256  # a micro-batch as before, at most
    assert plan.slots == plan.parts * plan.rows * plan.width
    assert needed <= plan.slots < needed / 0.85


def test_rows_are_longer_where_attention_is_cheap():
    """Sequences of 40, 40, 40 and 20, 140 together: in rows of 80 they need two, in one row 144, the next multiple of 8.

    Where attention is all that costs, one row of 144 costs 144^2 = 20,736 against the 4 * 64^2 = 16,384 of unpacked rows.
    """
    lengths = packing.Lengths(np.array([40, 40, 40, 20]), np.array([20, 20, 20, 10]), 64, 44)
    for attention, shape in ((1e6, (2, 80)), (1e-2, (1, 144))):
        _, plan = packing.plan(lengths, 1, 1, attention)
        assert (plan.rows, plan.width) == shape


def test_full_rows_are_left_alone():
    order, plan = packing.plan(lengths_of([PROMPT] * 8, [RESPONSE] * 8), 2, 2, attention=0.0)
    assert plan is None
    np.testing.assert_array_equal(order, np.arange(8))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_plan_gives_every_sequence_slots_of_its_own_and_never_costs_more(data):
    shards, limit, count = (data.draw(st.integers(1, n)) for n in (3, 3, 6))
    size = shards * limit * count
    responses = np.array(data.draw(st.lists(st.integers(0, 40), min_size=size, max_size=size)))
    tokens = np.where(responses, responses + 8, 0)
    reorder, attention = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 1e-3, 1.0]))
    order, plan = packing.plan(packing.Lengths(tokens, responses, 48, 40), shards, limit, attention, reorder=reorder)
    assert sorted(order) == list(range(size))
    if plan is None or not reorder:
        np.testing.assert_array_equal(order, np.arange(size))
    if plan is None:
        return
    assert plan.parts <= limit
    # In slots and in products of attention, of a micro-batch and of all of them.
    assert plan.rows * plan.width <= count * 48
    cost, unpacked = plan.rows * plan.width * (1 + attention * plan.width), count * 48 * (1 + attention * 48)
    assert cost <= unpacked and plan.parts * cost < limit * unpacked
    tokens, responses = tokens[order], responses[order]
    for first in range(0, size, size // shards):  # a device's rows
        for part in range(plan.parts):
            rows = np.arange(first, first + size // shards)[part :: plan.parts]  # as `minibatches.split` cuts
            taken = [slot for r in rows for slot in range(plan.offset[r], plan.offset[r] + tokens[r]) if tokens[r]]
            assert len(set(taken)) == len(taken) == tokens[rows].sum()
            assert not taken or (min(taken) >= 0 and max(taken) < plan.rows * plan.width)
            assert responses[rows].sum() <= plan.tokens
            for r in rows[tokens[rows] > 0]:
                assert plan.offset[r] // plan.width == (plan.offset[r] + tokens[r] - 1) // plan.width


# ---- The device's part -----------------------------------------------------------------------------------------------

ROWS = 8
LENGTHS = st.lists(st.tuples(st.integers(1, PROMPT), st.integers(0, RESPONSE)), min_size=ROWS, max_size=ROWS)


def close(a, b):
    """Equal but for float32 rounding, which the small entries of an array take over from its large ones."""

    def one(x, y):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5 * max(2.0, np.abs(y).max()))

    jax.tree.map(one, a, b)


@pytest.fixture(scope="module", params=["pdm", "gspo"])
def accumulate(request):
    """Jitted loss terms and gradient: top-K view, ratio of whole sequences; two micro-batches unpacked."""
    config, graphdef, params = tiny.decoder()
    loss = objectives.build({"name": request.param, "aggregation": {"mode": "seq_mean_token_mean"}})
    forward = Forward(graphdef, config.vocab_size, entropy=True, topk="topk_logprobs" in loss.needs)
    step = TrainStep(forward, loss, optax.sgd(1.0), micro_batches=2)
    return jax.jit(lambda batch: step.accumulate(params, batch))


@settings(max_examples=10, deadline=None)
@given(rows=LENGTHS)
def test_losses_metrics_and_gradients_do_not_notice(accumulate, rows):
    assume(sum(map(sum, rows)) < 48)  # then first fit finds room for all
    batch = make_batch(*zip(*rows, strict=True))
    close(accumulate(packed(batch, rows=6, width=12, tokens=ROWS * RESPONSE)), accumulate(batch))


@pytest.fixture(scope="module")
def hybrid():
    """A gated delta net, attention and experts, with routing to replay."""
    return tiny.decoder(
        layer_types=("linear_attention", "full_attention"),
        delta_net=DeltaNetConfig(num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8, conv_size=3),
        moe=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=16),
    )


def test_recurrent_layers_and_experts_keep_sequences_apart(hybrid):
    config, graphdef, params = hybrid
    batch = make_batch([4, 3, 1, 2, 4, 1, 2, 3], [6, 1, 2, 5, 3, 0, 4, 1])
    routing = np.random.default_rng(1).permuted(np.tile(np.arange(4), (ROWS, PROMPT + RESPONSE, 2, 1)), axis=-1)
    batch = batch.replace(routed_experts=routing[..., :2].astype(np.int32))
    forward = Forward(graphdef, config.vocab_size, entropy=True, topk=True)

    @jax.jit
    def statistics(params, batch):
        def value(params):
            stats = forward(params, batch)
            mask = batch.response_mask
            seen = stats.logprobs, stats.entropy, jnp.sum(stats.topk_logprobs, axis=-1)
            seen = jax.tree.map(lambda x: jnp.where(mask, x, 0), seen)
            return jnp.sum(seen[0] * batch.advantages + seen[1] + seen[2] * batch.old_logprobs), (
                seen,
                stats.router_load,
            )

        return jax.value_and_grad(value, has_aux=True)(params)

    (value, (seen, load)), gradient = statistics(params, packed(batch, rows=4, width=16, tokens=24))
    (value_, (seen_, load_)), gradient_ = statistics(params, batch)
    close((value, seen, gradient), (value_, seen_, gradient_))
    # Of tokens that were computed: the left-out sequence, row 5, is none of them.
    kept = routing[..., :2][(np.asarray(batch.segment_ids) > 0) & (np.arange(ROWS) != 5)[:, None]]
    shares = [np.bincount(kept[:, layer].ravel(), minlength=4) / kept[:, layer].size for layer in range(2)]
    np.testing.assert_allclose(load, shares, rtol=1e-6)


def test_a_critic_reads_its_values_at_the_same_places():
    config, _, _ = tiny.decoder()
    graphdef, params = nnx.split(ScalarModel(config, rngs=nnx.Rngs(0)), nnx.Param)
    params["score"]["kernel"] = jax.tree.map(lambda x: x + 0.3, params["score"]["kernel"])
    values = jax.jit(lambda batch: Values(graphdef)(params, None, batch))
    responses = np.array([6, 1, 2, 5, 3, 0, 4, 1])
    batch = make_batch([4, 3, 1, 2, 4, 1, 2, 3], responses)
    where = (np.arange(RESPONSE + 1) <= responses[:, None]) & (responses > 0)[:, None]
    ours, own = values(packed(batch, rows=4, width=16, tokens=24)), values(batch)
    np.testing.assert_allclose(np.where(where, ours, 0), np.where(where, own, 0), rtol=1e-4, atol=1e-5)


def test_a_part_of_another_size_is_refused():
    config, graphdef, params = tiny.decoder()
    batch = packed(make_batch([4] * 8, [1] * 8), rows=4, width=16, tokens=8)
    with pytest.raises(AssertionError, match="not the part that was packed"):
        Forward(graphdef, config.vocab_size)(params, jax.tree.map(lambda x: x[:4], batch))


def test_devices_pack_their_own_rows_and_score_as_one():
    config, graphdef, params = tiny.decoder()
    mesh = sharding.create_mesh(Mesh(data=2, fsdp=2, tensor=2))
    prompts, responses = np.tile([4, 3, 1, 2], 4), np.tile([6, 1, 2, 5, 3, 0, 4, 1], 2)
    batch = make_batch(prompts, responses)
    own = jax.jit(lambda params, batch: score(Forward(graphdef, config.vocab_size), params, batch))(params, batch)
    placed = sharding.put(params, sharding.shardings(params, mesh))
    shared = packed(batch, rows=1, width=16, tokens=8, parts=2, shards=sharding.data_shards(mesh))
    shared = sharding.put(shared, sharding.batch_sharding(mesh))
    forward = Forward(graphdef, config.vocab_size, layout=sharding.token_layout(mesh))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda params, batch: score(forward, params, batch))(placed, shared)
    found, own = (np.where(batch.response_mask, x, 0) for x in (found, own))
    np.testing.assert_allclose(found, own, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_run_with_a_critic_and_a_reference_comes_to_the_same(tmp_path):
    """On one device, that is in a process of its own: of eight devices each has one sequence a micro-batch."""
    fields = ["objective__name='ppo_clip'", "kl__reward=0.1", "diagnostics__margin=0.2", "training__autopsy_delta=0.01"]
    fields += ["rollout__max_response_length=24", "rollout__staleness=0", "rollout__refill_rounds=0"]
    fields += ["training__rollouts=2", "training__micro_batches=2"]
    rows = []
    for packed in (False, True):
        command = [sys.executable, "-m", "tests.tiny_runs", str(tmp_path / str(packed)), *fields]
        subprocess.run([*command, f"training__packing={packed}"], check=True, timeout=900, env=one_device())
        rows.append(run.rows(tmp_path / str(packed))[1:])
    for own, shared in zip(*rows, strict=True):
        assert shared.pop("data/padding_share") < own.pop("data/padding_share")
        assert own.keys() == shared.keys()
        for name in own:
            # Adam turns rounding of tiny gradients into steps of full size, so later rollouts agree less.
            np.testing.assert_allclose(shared[name], own[name], rtol=2e-3, atol=2e-3, err_msg=name)


def one_device():
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
