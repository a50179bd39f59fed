"""The critic's loss, explained variance, whitening and Bradley-Terry, against numpy, float64 autodiff and literals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import objectives

MASK = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], bool)


def arrays(seed, count=3):
    garbage = np.where(MASK, 0, np.nan)
    return [x + garbage for x in np.random.default_rng(seed).normal(size=(count, *MASK.shape))]


def test_value_loss_by_hand():
    values, old, returns = np.array([[1.0, 0.1, 0.5]]), np.array([[0.0, 0.0, 0.0]]), np.array([[1.0, 1.0, 0.3]])
    mask = np.ones_like(values, bool)
    # 1.0 is clipped to 0.2 and judged there; 0.1 is inside; 0.5 is clipped to 0.2, but its plain error is larger.
    expected = [[0.5 * 0.8**2, 0.5 * 0.9**2, 0.5 * 0.2**2]]
    np.testing.assert_allclose(objectives.value_loss(values, old, returns, mask, clip=0.2), expected, rtol=1e-6)
    plain = [[0.0, 0.5 * 0.9**2, 0.5 * 0.2**2]]
    np.testing.assert_allclose(objectives.value_loss(values, old, returns, mask, clip=0.0), plain, rtol=1e-6)


def test_value_gradient_stops_where_clipping_won_and_ignores_garbage():
    values, old, returns = arrays(0)
    values[0, 0], old[0, 0], returns[0, 0] = 1.0, 0.0, 1.2  # clipped to 0.2: error 1, larger than the plain 0.2
    gradient = jax.grad(lambda v: jnp.sum(objectives.value_loss(v, old, returns, MASK, clip=0.2)))(jnp.array(values))
    assert np.isfinite(gradient).all()
    assert gradient[0, 0] == 0
    np.testing.assert_array_equal(np.where(MASK, 0, gradient), 0)
    unclipped = jax.grad(lambda v: jnp.sum(objectives.value_loss(v, old, returns, MASK, clip=0.0)))(jnp.array(values))
    np.testing.assert_allclose(unclipped[MASK], (values - returns)[MASK], rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_explained_variance_is_that_of_numpy(seed):
    values, returns, _ = arrays(seed)
    expected = 1 - np.var((returns - values)[MASK]) / np.var(returns[MASK])
    np.testing.assert_allclose(objectives.explained_variance(values, returns, MASK), expected, rtol=1e-4)


def test_explained_variance_at_its_ends():
    values, returns, _ = arrays(1)
    np.testing.assert_allclose(objectives.explained_variance(returns, returns, MASK), 1.0)
    # A constant error is bias, not variance.
    np.testing.assert_allclose(objectives.explained_variance(returns + 3, returns, MASK), 1.0, atol=1e-5)
    np.testing.assert_allclose(objectives.explained_variance(np.full(MASK.shape, 0.7), returns, MASK), 0.0, atol=1e-5)
    assert objectives.explained_variance(values, np.ones(MASK.shape), MASK) == 0
    assert objectives.explained_variance(values, returns, np.zeros_like(MASK)) == 0


@settings(max_examples=15, deadline=None)
@given(shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
def test_whitening_forgets_shift_and_scale(shift, scale):
    advantages, *_ = arrays(2)
    white = np.asarray(objectives.whiten(advantages, MASK))
    np.testing.assert_allclose([white[MASK].mean(), white[MASK].std()], [0, 1], atol=1e-5)
    np.testing.assert_allclose(objectives.whiten(advantages * scale + shift, MASK), white, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(white[~MASK], 0)


def test_bradley_terry_is_the_log_likelihood_and_its_gradient():
    chosen, rejected = np.array([0.0, 2.0, -1.0, 50.0, -90.0]), np.array([0.0, 0.5, 1.0, -50.0, 90.0])
    loss = objectives.bradley_terry(chosen, rejected)
    np.testing.assert_allclose(loss, np.logaddexp(0, rejected - chosen), rtol=1e-6, atol=1e-12)
    assert float(loss[0]) == pytest.approx(np.log(2))
    by_chosen, by_rejected = jax.grad(lambda c, r: jnp.sum(objectives.bradley_terry(c, r)), (0, 1))(
        jnp.array(chosen), jnp.array(rejected)
    )
    sigmoid = 1 / (1 + np.exp(-(chosen - rejected)))
    np.testing.assert_allclose(by_chosen, sigmoid - 1, atol=1e-6)
    np.testing.assert_allclose(by_rejected, 1 - sigmoid, atol=1e-6)
