"""The critic: where its values stand, its targets against a float64 loop, its step against the equation."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from jaxrl_llm.config import RunConfig, default_config
from jaxrl_llm.learning import reference
from jaxrl_llm.learning.critic import CriticStep, Values, targets
from jaxrl_llm.models.heads import ScalarHead, ScalarModel
from jaxrl_llm.tasks import arithmetic
from jaxrl_llm.training import loop
from jaxrl_llm.types import Batch, CriticState
from tests import tiny
from tests import tiny_runs as runs


def make_batch(lengths, width=5, prompt=3, seed=0):
    rng = np.random.default_rng(seed)
    response = np.arange(width) < np.array(lengths)[:, None]
    mask = np.concatenate([np.ones((len(lengths), prompt), bool), response], axis=1)
    return Batch(
        tokens=jnp.asarray(rng.integers(3, 19, mask.shape), jnp.int32),
        positions=jnp.asarray(np.maximum(np.cumsum(mask, axis=1) - 1, 0), jnp.int32),
        segment_ids=jnp.asarray(mask, jnp.int32),
        response_mask=jnp.asarray(response),
        behavior_logprobs=jnp.zeros(response.shape, jnp.float32),
        advantages=jnp.zeros(response.shape, jnp.float32),
        old_values=jnp.asarray(rng.normal(size=response.shape), jnp.float32),
        returns=jnp.asarray(rng.normal(size=response.shape), jnp.float32),
    )


@pytest.fixture(scope="module")
def critic():
    config, _, _ = tiny.decoder()
    graphdef, params = nnx.split(ScalarModel(config, rngs=nnx.Rngs(0)), nnx.Param)
    params["score"]["kernel"] = jax.tree.map(lambda x: x + 0.3, params["score"]["kernel"])
    return Values(graphdef), params


def by_definition(rewards, values, length, last, gamma, lam):
    """Advantages of one row, float64, each written out as the sum of the discounted temporal differences."""
    v = [*values[:length], last]
    deltas = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(length)]
    return np.array([sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, length)) for t in range(length)])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0)])
def test_targets_bootstrap_where_truncated_and_nowhere_else(gamma, lam):
    rng = np.random.default_rng(0)
    lengths, truncated = (
        [5, 5, 2, 3],
        np.array([True, False, False, True]),
    )  # row 3: cut by another limit than the width
    batch = make_batch(lengths)
    values, rewards = rng.normal(size=(4, 6)), rng.normal(size=(4, 5))
    rewards[~np.asarray(batch.response_mask)] = np.nan  # what padding holds does not matter
    got, metrics = targets(batch, jnp.float32(values), jnp.float32(rewards), jnp.asarray(truncated), gamma, lam, False)
    expected = np.zeros((4, 5))
    for row, length in enumerate(lengths):
        last = values[row, length] if truncated[row] else 0.0
        expected[row, :length] = by_definition(rewards[row], values[row], length, last, gamma, lam)
    np.testing.assert_allclose(got.advantages, expected, rtol=1e-4, atol=1e-5)
    mask = np.asarray(batch.response_mask)
    returns = (expected + values[:, :5])[mask]
    np.testing.assert_allclose(np.asarray(got.returns)[mask], returns, rtol=1e-4, atol=1e-5)
    variance = 1 - np.var(returns - values[:, :5][mask]) / np.var(returns)
    np.testing.assert_allclose(metrics["critic/explained_variance"], variance, rtol=1e-3, atol=1e-4)


def test_a_failed_grader_teaches_nobody():
    batch = make_batch([4, 5])
    rewards = np.zeros((2, 5), np.float32)
    rewards[0, 3], rewards[1, 4] = np.nan, 1.0
    values = jnp.asarray(np.random.default_rng(1).normal(size=(2, 6)), jnp.float32)
    got, metrics = targets(batch, values, jnp.asarray(rewards), jnp.array([False, False]), 1.0, 1.0, True)
    np.testing.assert_array_equal(got.advantages[0], 0)
    np.testing.assert_array_equal(got.returns[0], got.old_values[0])
    assert np.abs(got.advantages[1]).min() > 0
    np.testing.assert_allclose([np.mean(got.advantages[1]), np.std(got.advantages[1])], [0, 1], atol=1e-5)
    assert np.isfinite(list(metrics.values())).all()


def test_values_stand_before_their_tokens_and_see_nothing_later(critic):
    values, params = critic
    batch = make_batch([5, 5])
    forward = jax.jit(lambda batch: values(params, None, batch))
    whole = forward(batch)
    assert whole.shape == (2, 6)
    changed = forward(batch.replace(tokens=batch.tokens.at[:, 3 + 2].set(4)))  # response token 2
    np.testing.assert_array_equal(changed[:, :3], whole[:, :3])
    assert np.abs(changed[:, 3:] - whole[:, 3:]).min() > 0


def test_one_step_is_the_gradient_of_the_mean_whatever_the_micro_batches(critic):
    values, params = critic
    batch = make_batch([5, 1, 3, 4])

    def mean(params):
        v = values(params, None, batch)[:, :-1]
        bounded = jnp.clip(v, batch.old_values - 0.2, batch.old_values + 0.2)
        error = jnp.maximum((v - batch.returns) ** 2, (bounded - batch.returns) ** 2)
        return jnp.sum(jnp.where(batch.response_mask, 0.5 * error, 0)) / jnp.sum(batch.response_mask)

    value, gradient = jax.jit(jax.value_and_grad(mean))(params)
    optimizer = optax.sgd(0.1)
    for parts in (1, 2):
        step = CriticStep(values, optimizer, 0.2, parts)
        new, metrics = jax.jit(step)(CriticState(params, optimizer.init(params)), None, batch)
        np.testing.assert_allclose(metrics["critic/loss"].numerator, value, rtol=1e-5)
        jax.tree.map(
            lambda a, p, g: np.testing.assert_allclose(a, p - 0.1 * g, rtol=1e-3, atol=1e-5),
            new.params,
            params,
            gradient,
        )


def test_a_critic_learns_what_the_prompt_decides():
    """Returns known from the prompt's first token: after some steps the values of other prompts explain them."""
    config, _, _ = tiny.decoder(num_layers=1)
    graphdef, params = nnx.split(ScalarModel(config, rngs=nnx.Rngs(0)), nnx.Param)
    values, optimizer = Values(graphdef), optax.adam(1e-2)
    step = jax.jit(CriticStep(values, optimizer, clip=0.0))
    state = CriticState(params, optimizer.init(params))

    def batch(seed):
        drawn = make_batch([5, 2, 3, 1] * 8, seed=seed)
        decided = jnp.where(drawn.tokens[:, :1] % 2 == 0, 1.0, -1.0)
        return drawn.replace(returns=jnp.broadcast_to(decided, drawn.response_mask.shape))

    for seed in range(40):
        state, _ = step(state, None, batch(seed))
    fresh = batch(99)
    predicted, mask = jax.jit(values)(state.params, None, fresh)[:, :-1], np.asarray(fresh.response_mask)
    returns = np.asarray(fresh.returns)[mask]
    assert 1 - np.var(returns - np.asarray(predicted)[mask]) / np.var(returns) > 0.5


@pytest.mark.slow
def test_the_critic_of_a_run_explains_rewards_that_the_prompt_decides(tmp_path):
    config = runs.config(
        tmp_path,
        objective__name="ppo_clip",
        rollout__staleness=0,
        rollout__refill_rounds=0,
        rollout__prompts=64,
        critic__learning_rate=5e-3,
        training__rollouts=20,
        training__epochs=2,
        evaluation__every=0,
        checkpoint__every=20,
    )
    config.objective.penalty.kl = 0.0

    def score(self, examples, completions, lengths, truncated):
        return [float(int(example.prompt[0]) % 2) for example in examples]

    with mock.patch.object(arithmetic.ArithmeticTask, "score", score):
        loop.train(RunConfig.read(config), console=Console(quiet=True))
    # Measured on every rollout before the critic has seen it.
    explained = [row["critic/explained_variance"] for row in runs.rows(tmp_path) if "critic/explained_variance" in row]
    assert explained[0] < 0.1
    assert min(explained[-3:]) > 0.5


def test_a_head_on_the_policys_trunk_reads_it_and_leaves_it_alone():
    config, graphdef, policy = tiny.decoder()
    head, params = nnx.split(ScalarHead(config), nnx.Param)
    params["kernel"] = jax.tree.map(lambda x: x + 1.0, params["kernel"])
    values, batch = Values(head, graphdef), make_batch([5, 2])
    model = nnx.merge(graphdef, policy)
    hidden = np.asarray(model.hidden(batch.tokens, batch.positions, batch.segment_ids))[:, 2:]
    got, (of_head, of_policy) = jax.jit(
        jax.value_and_grad(lambda h, p: jnp.sum(values(h, p, batch)[0]), argnums=(0, 1))
    )(params, policy)
    np.testing.assert_allclose(got, hidden[0].sum(), rtol=1e-4)
    np.testing.assert_allclose(jax.tree.leaves(of_head)[0][:, 0], hidden[0].sum(axis=0), rtol=1e-3, atol=1e-4)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(of_policy))


def test_the_references_kl_costs_reward_token_by_token():
    mask = np.array([[1, 1, 0], [1, 1, 1]], bool)
    logprobs = np.array([[-1.0, -2.0, np.nan], [-1.0, -1.0, -1.0]], np.float32)
    ref = np.array([[-1.5, -1.0, 0.0], [-1.0, -1.0, -3.0]], np.float32)
    got = reference.token_costs(mask, logprobs, ref, 0.1)
    np.testing.assert_allclose(got, [[0.05, -0.1, 0], [0, 0, 0.2]], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(reference.kl_per_token(logprobs, ref, mask), (0.5 - 1 + 2) / 5, rtol=1e-6)


def test_coefficients_follow_their_target():
    assert reference.steer(2.0, kl=0.3, target=0.0, rate=0.1) == 2.0
    assert reference.steer(2.0, kl=9.0, target=0.1, rate=0.1) == pytest.approx(2.2)
    assert reference.steer(2.0, kl=0.0, target=0.1, rate=0.1) == pytest.approx(1.8)
    assert reference.steer(2.0, kl=0.11, target=0.1, rate=0.1) == pytest.approx(2.1)


def test_the_estimator_follows_the_objective():
    config = default_config()
    run = RunConfig.read(config)
    assert dataclasses.replace(run, objective={"name": "ppo_or"}).estimator == "gae"
    assert dataclasses.replace(run, objective={"name": "grpo_or"}).estimator == "group"
    config.kl.target = 0.1
    with pytest.raises(ValueError, match="config.kl.target is 0.1; it must be 0 where neither"):
        RunConfig.read(config)
