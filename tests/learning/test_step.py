"""The optimizer step: micro-batches, clipping, skipped steps, float32 moments, one compilation, and optax by hand."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.config import Optimizer
from jaxrl_llm.learning import optimizer as optimizers
from jaxrl_llm.learning.step import Forward, TrainStep, score
from jaxrl_llm.types import Batch, TokenStats, TopKView, TrainState
from tests import tiny


def make_batch(rows=8, prompt=4, length=5, vocab=19, seed=0) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, rows)
    response = np.arange(length) < lengths[:, None]
    mask = np.concatenate([np.ones((rows, prompt), bool), response], axis=1)
    ids = np.argsort(rng.random((rows, length, vocab)), axis=-1)[..., :3]
    return Batch(
        tokens=jnp.asarray(rng.integers(3, vocab, (rows, prompt + length)), jnp.int32),
        positions=jnp.asarray(np.cumsum(mask, axis=1) - 1, jnp.int32),
        segment_ids=jnp.asarray(mask, jnp.int32),
        response_mask=jnp.asarray(response),
        behavior_logprobs=jnp.asarray(rng.uniform(-4, -0.1, (rows, length)), jnp.float32),
        advantages=jnp.asarray(rng.normal(size=(rows, length)), jnp.float32),
        topk=TopKView(jnp.asarray(ids, jnp.int32), jnp.log(jnp.full((rows, length, 3), 0.2, jnp.float32))),
        old_logprobs=jnp.asarray(rng.uniform(-4, -0.1, (rows, length)), jnp.float32),
    )


def make_step(name="pdm", micro_batches=1, optimizer=None, **loss):
    config, graphdef, params = tiny.decoder()
    loss = objectives.build({"name": name, **loss})
    forward = Forward(graphdef, config.vocab_size, entropy=True, topk="topk_logprobs" in loss.needs)
    optimizer = optimizer or optax.sgd(0.1)
    step = TrainStep(forward, loss, optimizer, micro_batches)
    state = TrainState(jnp.int32(0), params, optimizers.init(optimizer, params), jnp.int32(0))
    return step, state


@pytest.mark.parametrize(
    ("name", "mode"), [("pdm", "token_mean"), ("drpo", "seq_mean_token_mean"), ("grpo_or", "token_mean")]
)
def test_micro_batches_change_neither_value_nor_update(name, mode):
    batch = make_batch()
    results = []
    for parts in (1, 4):
        step, state = make_step(name, parts, aggregation={"mode": mode})
        state, metrics = jax.jit(step)(state, batch)
        results.append((state.params, {k: float(m.numerator / m.denominator) for k, m in metrics.items()}))
    for params, metrics in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), params, results[0][0])
        for key, value in results[0][1].items():
            np.testing.assert_allclose(metrics[key], value, rtol=1e-4, atol=1e-6, err_msg=key)


def test_the_update_is_the_gradient_of_the_whole_batchs_mean():
    """Against a loss written from the equation: -A r over all response tokens of the batch, in one mean."""
    batch, (step, state) = make_batch(), make_step("pg_is", 4)

    def mean(params):
        logprobs = step.forward(params, batch).logprobs
        surrogate = -batch.advantages * jnp.exp(logprobs - batch.behavior_logprobs)
        return jnp.sum(jnp.where(batch.response_mask, surrogate, 0)) / jnp.sum(batch.response_mask)

    value, gradient = jax.jit(jax.value_and_grad(mean))(state.params)
    new, metrics = jax.jit(step)(state, batch)
    np.testing.assert_allclose(metrics["loss"].numerator, value, rtol=1e-5)
    np.testing.assert_allclose(metrics["optimizer/grad_norm"].numerator, optax.global_norm(gradient), rtol=1e-4)
    jax.tree.map(
        lambda a, p, g: np.testing.assert_allclose(a, p - 0.1 * g, rtol=1e-4, atol=1e-6),
        new.params,
        state.params,
        gradient,
    )


def test_clipping_bounds_the_update_but_reports_the_norm_before_it():
    optimizer = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    step, state = make_step("pg_is", optimizer=optimizer)
    _, metrics = jax.jit(step)(state, make_batch())
    assert float(metrics["optimizer/grad_norm"].numerator) > 1e-2
    np.testing.assert_allclose(metrics["optimizer/update_norm"].numerator, 1e-3, rtol=1e-4)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    step, state = make_step("pg_is", optimizer=optax.adam(1e-3))
    broken = make_batch()
    broken = dataclasses.replace(broken, advantages=broken.advantages.at[0, 0].set(jnp.inf))
    new, metrics = jax.jit(step)(state, broken)
    assert int(new.skipped) == 1
    assert int(new.step) == 1
    assert float(metrics["optimizer/skipped"].numerator) == 1
    chex.assert_trees_all_equal(new.params, state.params)
    chex.assert_trees_all_equal(new.opt_state, state.opt_state)
    after, _ = jax.jit(step)(new, make_batch())
    assert int(after.skipped) == 1
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(new.params), strict=True)
    )


def test_an_all_masked_batch_moves_nothing():
    step, state = make_step("pg_is")
    batch = make_batch()
    new, metrics = jax.jit(step)(state, dataclasses.replace(batch, response_mask=jnp.zeros_like(batch.response_mask)))
    assert float(metrics["loss"].numerator) == 0
    chex.assert_trees_all_equal(new.params, state.params)


def test_the_step_compiles_once_and_gives_back_its_buffers():
    step, state = make_step("grpo", optimizer=optimizers.create(Optimizer(learning_rate=1e-3), 10))
    traced = jax.jit(chex.assert_max_traces(step.__call__, n=1), donate_argnums=0)
    state = jax.tree.map(jnp.copy, state)
    first = state.params
    for seed in range(3):
        state, _ = traced(state, make_batch(seed=seed))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))


def test_moments_are_float32_whatever_the_parameters_are():
    _, _, params = tiny.decoder()
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    moments = optimizers.init(optimizers.create(Optimizer(), 10), half)
    floats = [leaf for leaf in jax.tree.leaves(moments) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert floats
    assert all(leaf.dtype == jnp.float32 for leaf in floats)


def test_scoring_in_parts_equals_scoring_at_once_in_the_same_order():
    step, state = make_step()
    batch = make_batch()
    once = score(step.forward, state.params, batch)
    np.testing.assert_allclose(score(step.forward, state.params, batch, 4), once, rtol=1e-5, atol=1e-6)
    stats = step.forward(state.params, batch)
    assert isinstance(stats, TokenStats)
    np.testing.assert_allclose(once, stats.logprobs, rtol=1e-6)


def test_schedules_start_moving_at_once_and_end_where_they_say():
    rate = optimizers.schedule(Optimizer(learning_rate=1.0, warmup_steps=4, schedule="linear"), 12)
    np.testing.assert_allclose([rate(i) for i in (0, 1, 2, 3)], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    np.testing.assert_allclose([rate(8), rate(12)], [0.5, 0.0], atol=1e-6)
    constant = optimizers.schedule(Optimizer(learning_rate=2.0), 12)
    assert [float(constant(i)) for i in (0, 11)] == [2.0, 2.0]
