"""Selection without sorting, against numpy's sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.ops import top_k as selection

BIG = 8193  # the last block is not full


@pytest.mark.parametrize("k", [1, 20, 256])
@pytest.mark.parametrize("size", [300, BIG])
def test_top_k_equals_a_stable_sort_with_ties(k, size):
    rng = np.random.default_rng(k)
    x = rng.normal(size=(3, size)).astype(np.float32)
    x[1] = rng.integers(0, 5, size)  # nearly everything is a tie
    x[2, 10:] = -np.inf
    values, ids = jax.jit(selection.top_k, static_argnums=1)(x, k)
    expected = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis=-1))


def smallest_set(probs, mass):
    """Which tokens are kept, by sorting in float64."""
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    kept = np.zeros(len(probs), bool)
    kept[order[before < mass]] = True
    return kept


nucleus = jax.jit(selection.nucleus)


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(0.01, 20), top_p=st.floats(0.01, 0.999), seed=st.integers(0, 2**31))
def test_nucleus_is_the_smallest_set_that_holds_the_mass(scale, top_p, seed):
    logprobs = np.array(
        jax.nn.log_softmax(scale * np.random.default_rng(seed).normal(size=(2, 700)).astype(np.float32))
    )
    thresholds = np.asarray(nucleus(logprobs, np.full(2, top_p, np.float32)))
    for row, threshold in zip(logprobs, thresholds, strict=True):
        kept, probs = row >= threshold, np.exp(row.astype(np.float64))
        # The one token at the boundary may fall either way where the mass is met to float32 rounding.
        expected = (smallest_set(probs, top_p - 1e-6), smallest_set(probs, top_p + 1e-6))
        assert (expected[0] <= kept).all()
        assert (kept <= expected[1]).all()


def test_nucleus_at_the_edges():
    logs = jnp.log(jnp.array([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1]]))
    # Half is held by the first alone; ties stay together; a row that holds less keeps all it has.
    for mass, kept in ((0.5, [1, 1, 4]), (0.6, [3, 1, 4]), (0.2, [1, 1, 4]), (0.999, [3, 1, 4])):
        thresholds = nucleus(logs, jnp.full(3, mass))
        assert np.sum((logs >= thresholds[:, None]) & (logs > -jnp.inf), axis=1).tolist() == kept
