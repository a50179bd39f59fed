"""Token choice: the recorded distribution against numpy, and drawn frequencies against the recorded distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.rollout import choice as choices
from jaxrl_llm.rollout.choice import Choice, behavior_distribution, draw, random_numbers


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities and kept mass by sorting, in float64."""
    z = np.asarray(logits, np.float64) / temperature
    p = np.exp(z - np.logaddexp.reduce(z))
    kept = np.ones(len(p), bool)
    if 0 < top_k < len(p):
        kept &= p >= np.sort(p)[-top_k]
    if top_p < 1:
        order = np.argsort(-np.where(kept, p, 0))
        q = np.where(kept, p, 0)[order] / p[kept].sum()
        nucleus = order[: int(np.sum(np.cumsum(q) - q < top_p))]
        kept &= np.isin(np.arange(len(p)), nucleus)
    if min_p:
        kept &= p >= min_p * p.max()
    return np.where(kept, p, 0) / p[kept].sum(), p[kept].sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [11, 600])
def test_distribution_is_the_truncated_renormalised_one(options, size):
    logits = np.random.default_rng(0).normal(size=(4, size)).astype(np.float32) * 2
    got = behavior_distribution(jnp.asarray(logits), Choice(**options))
    for row in range(4):
        probs, mass = reference(logits[row], **options)
        np.testing.assert_allclose(np.exp(got.logprobs[row]), probs, rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(np.exp(got.log_kept_mass[row]), mass, rtol=1e-5)


def test_a_flat_nucleus_beyond_the_prefilter_is_still_exact():
    logits = jnp.zeros((2, choices.PREFILTER * 4)).at[:, 0].set(1.0)
    logits = logits + 1e-4 * jnp.arange(logits.shape[1])
    got = behavior_distribution(logits, Choice(top_p=0.9))
    probs, _ = reference(np.asarray(logits[0]), top_p=0.9)
    assert np.sum(probs > 0) > choices.PREFILTER
    assert abs(int(jnp.sum(jnp.isfinite(got.logprobs[0]))) - np.sum(probs > 0)) <= 1


@pytest.mark.parametrize("scales", [(0.0, 0.0), (6.0, 6.0), (6.0, 0.01)], ids=["flat", "peaked", "one of each"])
def test_a_nucleus_in_a_large_vocabulary_is_that_of_a_full_sort(scales):
    # A peaked row's nucleus lies within the prefilter; a flat one's does not, and is looked for everywhere.
    size = choices.SMALL + 77
    noise = np.random.default_rng(2).normal(size=(2, size))
    # Even steps keep tokens of the flat rows apart where float32 rounds.
    logits = np.float32(np.array(scales)[:, None] * noise + np.linspace(0, 1, size))
    got = jax.jit(behavior_distribution, static_argnums=(1, 2))(logits, Choice(top_p=0.9), 5)
    for row, scale in enumerate(scales):
        probs, mass = reference(logits[row], top_p=0.9)
        kept = np.isfinite(got.logprobs[row])
        assert (kept.sum() > choices.PREFILTER) == (scale < 1)
        # The sums of thousands of float32 numbers may let the last token of the nucleus fall either way.
        assert np.sum(kept != (probs > 0)) <= 3
        np.testing.assert_allclose(np.exp(got.log_kept_mass[row]), mass, atol=5e-4)
        np.testing.assert_allclose(np.exp(got.logprobs[row]), np.where(kept, probs, 0), atol=2e-5)
        np.testing.assert_array_equal(got.topk.ids[row], np.argsort(-logits[row], kind="stable")[:5])


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 4}, {"min_p": 0.2}, {"fp8": "e4m3"}], ids=str
)
def test_drawn_frequencies_match_the_recorded_probabilities(options):
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 9)) * 1.5, jnp.float32)
    distribution = behavior_distribution(logits, Choice(**options))
    many = jax.tree.map(lambda x: jnp.repeat(x, 20_000, axis=0), distribution)
    uniform = random_numbers(jax.random.key(0)[None], jnp.arange(20_000)[None])[0]
    tokens = np.asarray(draw(many, uniform, Choice(**options)))
    probs = np.exp(np.asarray(distribution.logprobs[0], np.float64))
    counts = np.bincount(tokens, minlength=9)
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] / probs.sum() * len(tokens)
    assert stats.chisquare(counts[probs > 0], expected).pvalue > 1e-3


def test_temperature_and_entropy_by_hand():
    # Logits [2, 0] at T = 0.5: softmax([4, 0]).
    got = behavior_distribution(jnp.array([[2.0, 0.0]]), Choice(temperature=0.5))
    np.testing.assert_allclose(got.logprobs[0, 0], -0.0181, atol=5e-5)
    p = 1 / (1 + np.exp(-4.0))
    np.testing.assert_allclose(choices.entropy(got), [-(p * np.log(p) + (1 - p) * np.log(1 - p))], rtol=1e-5)


def test_greedy_takes_the_most_probable_token():
    logits = jnp.array([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    choice = Choice(temperature=0.0)
    assert draw(behavior_distribution(logits, choice), jnp.zeros((2, 2)), choice).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("top_k", True), ("min_p", 1.0)],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        Choice(**{field: value})
