"""Advantages against literal values and plain numpy loops."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import objectives


class Literal(chex.TestCase):
    @chex.all_variants(with_pmap=False)
    def test_one_success_among_four(self):
        rewards, groups = jnp.array([1.0, 0, 0, 0]), jnp.zeros(4, jnp.int32)
        group = self.variant(lambda r, g: objectives.group_advantages(r, g, 1))
        np.testing.assert_allclose(group(rewards, groups), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
        rloo = self.variant(lambda r, g: objectives.rloo_advantages(r, g, 1))
        np.testing.assert_allclose(rloo(rewards, groups), [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)
        centred = self.variant(lambda r, g: objectives.group_advantages(r, g, 1, normalize_std=False))
        np.testing.assert_allclose(centred(rewards, groups), [0.75, -0.25, -0.25, -0.25], rtol=1e-6)


def test_groups_are_kept_apart_wherever_their_rows_stand():
    rewards, groups = jnp.array([1.0, 5.0, 0.0, 7.0]), jnp.array([0, 1, 0, 1])
    np.testing.assert_allclose(
        objectives.group_advantages(rewards, groups, 2, normalize_std=False), [0.5, -1.0, -0.5, 1.0]
    )


@pytest.mark.parametrize("reward", [0.1, 1.0, 1 / 3, -2.7, 0.7])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(reward, size):
    rewards, groups = jnp.full(size, reward, jnp.float32), jnp.zeros(size, jnp.int32)
    for advantages in (
        objectives.group_advantages(rewards, groups, 1),
        objectives.rloo_advantages(rewards, groups, 1),
        objectives.reinforce_plus_plus_advantages(rewards),
    ):
        np.testing.assert_array_equal(advantages, np.zeros(size))


def test_a_missing_reward_is_left_out_of_the_statistics():
    rewards, groups = jnp.array([1.0, np.nan, 0.0, 0.0, np.nan]), jnp.array([0, 0, 0, 0, 1])
    got = objectives.group_advantages(rewards, groups, 2)
    mean, std = 1 / 3, np.std([1, 0, 0], ddof=1)
    np.testing.assert_allclose(got, [(1 - mean) / std, 0, -mean / std, -mean / std, 0], rtol=1e-5)
    np.testing.assert_allclose(objectives.rloo_advantages(rewards, groups, 2), [1, 0, -0.5, -0.5, 0], rtol=1e-6)


def test_whitening_over_the_batch():
    rewards = np.array([3.0, 1.0, 2.0, 6.0], np.float32)
    expected = (rewards - rewards.mean()) / rewards.std(ddof=1)
    np.testing.assert_allclose(objectives.reinforce_plus_plus_advantages(jnp.array(rewards)), expected, rtol=1e-5)


def gae_by_definition(rewards, values, length, bootstrap, gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_{t+l}, each delta written out."""
    v = [*values[:length], bootstrap]
    deltas = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(length)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, length)) for t in range(length)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    pad=st.integers(0, 3),
)
def test_gae_equals_its_definition_across_padding_and_truncation(seed, gamma, lam, pad):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, 3)
    rewards, values = rng.normal(size=(2, 3, 5 + pad)).astype(np.float32)
    bootstrap = np.where(rng.random(3) < 0.5, rng.normal(size=3), 0.0).astype(np.float32)  # 0: ended
    mask = np.arange(5 + pad) < lengths[:, None]
    garbage = np.where(mask, 0, np.nan).astype(np.float32)
    advantages, returns = objectives.gae(rewards + garbage, values + garbage, mask, bootstrap, gamma=gamma, lam=lam)
    for row, length in enumerate(lengths):
        expected = gae_by_definition(rewards[row], values[row], length, bootstrap[row], gamma, lam)
        np.testing.assert_allclose(advantages[row, :length], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            returns[row, :length], np.array(expected) + values[row, :length], rtol=1e-4, atol=1e-5
        )
        np.testing.assert_array_equal(advantages[row, length:], 0)


def test_the_terminal_reward_lands_on_the_last_valid_token():
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    placed = objectives.terminal_rewards(jnp.array([2.0, 3.0, 4.0]), mask)
    np.testing.assert_array_equal(placed, [[0, 0, 2, 0], [0, 0, 0, 3], [0, 0, 0, 0]])
