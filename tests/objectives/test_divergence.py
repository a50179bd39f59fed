"""D and D_dot against autodiff through softmax, brute-force completed distributions, finite differences and hand-worked values."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.objectives import divergence as dv

KINDS = sorted(dv.DIVERGENCES)


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def distributions(seed: int, vocab: int, spread: float = 2.0):
    """Log-probs of mu and logits of pi, float64 [V]."""
    rng = np.random.default_rng(seed)
    mu = rng.normal(size=vocab) * spread
    return mu - np.logaddexp.reduce(mu), rng.normal(size=vocab) * spread


def reference(kind: str, mu: np.ndarray, pi: jax.Array) -> jax.Array:
    """Textbook definitions, on probabilities."""
    return {
        "kl": lambda: jnp.sum(mu * jnp.log(mu / pi)),
        "reverse_kl": lambda: jnp.sum(pi * jnp.log(pi / mu)),
        "tv": lambda: jnp.sum(jnp.abs(mu - pi)) / 2,
        "jensen_shannon": lambda: (
            (jnp.sum(mu * jnp.log(2 * mu / (mu + pi))) + jnp.sum(pi * jnp.log(2 * pi / (mu + pi)))) / 2
        ),
        "hellinger": lambda: jnp.sum((jnp.sqrt(mu) - jnp.sqrt(pi)) ** 2),
        "chi2": lambda: jnp.sum((mu - pi) ** 2 / pi),
    }[kind]()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_exact_view_equals_definition_and_jvp_through_softmax(kind, seed):
    log_mu, logits = distributions(seed, 7)
    k = seed % 7

    def d(z):
        return reference(kind, np.exp(log_mu), jax.nn.softmax(z))

    direction = jax.nn.one_hot(k, 7) - jax.nn.softmax(logits)
    value, rate = jax.jvp(d, (jnp.asarray(logits),), (direction,))
    view = dv.exact_view(jnp.asarray(log_mu), jax.nn.log_softmax(logits), jnp.int32(k))
    np.testing.assert_allclose(dv.divergence(view, dv.DIVERGENCES[kind]), value, rtol=1e-10)
    np.testing.assert_allclose(dv.directional_derivative(view, dv.DIVERGENCES[kind]), rate, rtol=1e-10, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), vocab=st.integers(2, 40))
def test_kl_rate_is_local_plus_global_term(seed, vocab):
    log_mu, logits = distributions(seed, vocab)
    mu, pi, k = np.exp(log_mu), np.exp(logits - np.logaddexp.reduce(logits)), seed % vocab
    view = dv.exact_view(log_mu, np.log(pi), np.int32(k))
    expected = (pi[k] - mu[k]) + np.sum(pi * (mu - pi))
    np.testing.assert_allclose(dv.directional_derivative(view), expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), advantage=st.sampled_from([-2.0, -0.3, 0.7, 3.0]))
def test_a_small_step_along_the_advantage_changes_d_by_a_d_dot(seed, advantage):
    log_mu, logits = distributions(seed, 9)
    k, step = seed % 9, 1e-6
    pi = np.exp(logits - np.logaddexp.reduce(logits))
    direction = np.eye(9)[k] - pi

    def d(z):
        p = np.exp(z - np.logaddexp.reduce(z))
        return np.sum(np.exp(log_mu) * (log_mu - np.log(p)))

    change = (d(logits + step * advantage * direction) - d(logits - step * advantage * direction)) / (2 * step)
    view = dv.exact_view(log_mu, np.log(pi), np.int32(k))
    np.testing.assert_allclose(change, advantage * float(dv.directional_derivative(view)), rtol=1e-5, atol=1e-8)


def topk(log_mu, log_pi, k, width, **options):
    ids = np.argsort(-log_mu)[:width]
    return dv.topk_view(
        jnp.asarray(ids),
        jnp.asarray(log_mu[ids]),
        jnp.asarray(log_pi[ids]),
        jnp.int32(k),
        jnp.float64(log_mu[k]),
        jnp.float64(log_pi[k]),
        len(log_mu),
        **options,
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(2, 12),
    width=st.integers(1, 12),
    tail=st.sampled_from(["aggregated", "uniform"]),
    kind=st.sampled_from(KINDS),
)
def test_topk_views_equal_brute_force_on_the_completed_distribution(seed, vocab, width, tail, kind):
    width = min(width, vocab)
    log_mu, logits = distributions(seed, vocab)
    mu, pi, k = np.exp(log_mu), np.exp(logits - np.logaddexp.reduce(logits)), seed % vocab
    kept = sorted({*np.argsort(-log_mu)[:width].tolist(), k})
    rest = vocab - len(kept)
    # Build the completed distributions token by token, then apply the exact definitions to them.
    spread = 0 if rest == 0 else (1 if tail == "aggregated" else rest)
    complete = [np.concatenate([p[kept], np.full(spread, (1 - p[kept].sum()) / max(spread, 1))]) for p in (mu, pi)]
    full_mu, full_pi = (np.maximum(p, 1e-300) for p in complete)
    exact = dv.exact_view(np.log(full_mu), np.log(full_pi), np.int32(kept.index(k)))
    view = topk(log_mu, np.log(pi), k, width, tail=tail)
    for function in (dv.divergence, dv.directional_derivative):
        np.testing.assert_allclose(
            function(view, dv.DIVERGENCES[kind]), function(exact, dv.DIVERGENCES[kind]), rtol=1e-7, atol=1e-9
        )


def test_topk_views_converge_to_exact_and_meet_it_at_full_width():
    log_mu, logits = distributions(3, 50, spread=3.0)
    log_pi = logits - np.logaddexp.reduce(logits)
    exact = dv.exact_view(log_mu, log_pi, np.int32(7))
    for tail in ("aggregated", "uniform"):
        gaps = []
        for width in (2, 10, 30, 50):
            view = topk(log_mu, log_pi, 7, width, tail=tail)
            gaps.append([float(abs(f(view) - f(exact))) for f in (dv.divergence, dv.directional_derivative)])
        assert gaps[0][0] > gaps[1][0] > gaps[2][0] > gaps[3][0]
        np.testing.assert_allclose(gaps[3], 0, atol=1e-12)


class WorkedValues(chex.TestCase):
    """Numbers small enough to check by hand; also that jit, no jit and pmap agree."""

    @chex.all_variants
    @parameterized.named_parameters(
        # mu [.5 .3 .15 .05], pi [.45 .15 .3 .1], sampled token 3, K = 2.
        ("union_tv", "union", "tv", 0.20),
        ("union_kl", "union", "kl", 0.1220),
        ("replace_tv", "replace", "tv", 0.05),
        ("replace_kl", "replace", "kl", 0.0180),
    )
    def test_sampled_token_outside_the_top_two(self, topk_set, kind, expected):
        mu, pi = np.log(np.array([[0.5, 0.3, 0.15, 0.05], [0.45, 0.15, 0.3, 0.1]], np.float32))

        def d(ids, mu_ids, pi_ids, token, mu_k, pi_k):
            view = dv.topk_view(ids, mu_ids, pi_ids, token, mu_k, pi_k, 4, topk_set=topk_set)
            return dv.divergence(view, dv.DIVERGENCES[kind])

        ids = np.array([[0, 1]])
        value = self.variant(d)(ids, mu[ids], pi[ids], np.array([3]), mu[[3]], pi[[3]])
        np.testing.assert_allclose(value, [expected], atol=5e-5)

    @chex.all_variants
    @parameterized.named_parameters(
        ("rare_tv", 1e-4, 1e-2, "tv", 0.0099),
        ("rare_kl", 1e-4, 1e-2, "kl", 0.0095),
        ("common_tv", 0.99, 0.80, "tv", 0.19),
        ("common_kl", 0.99, 0.80, "kl", 0.181),
        ("worked_tv", 0.05, 0.10, "tv", 0.05),
        ("worked_kl", 0.05, 0.10, "kl", 0.0167),
        ("certain_mu", 1.0, 0.9, "kl", 0.1054),
    )
    def test_binary(self, mu, pi, kind, expected):
        def d(mu, pi):
            return dv.divergence(dv.binary_view(mu, pi), dv.DIVERGENCES[kind])

        value = self.variant(d)(np.log([np.float32(mu)]), np.log([np.float32(pi)]))
        np.testing.assert_allclose(value, [expected], atol=6e-5)

    @chex.all_variants
    @parameterized.named_parameters(("exact", 0.045), ("binary", 0.09), ("topk", 0.045))
    def test_rates(self, expected):
        # The same pair, token 3. Local term .05; global term .45(.05) + .15(.15) + .3(-.15) + .1(-.05) = -.005.
        # Two points {3, not 3}: 2 (.05) (1 - .1). The top two with token 3 leave a tail of one token: exact again.
        mu, pi = np.log(np.array([[0.5, 0.3, 0.15, 0.05], [0.45, 0.15, 0.3, 0.1]], np.float32))
        name = self._testMethodName

        def rate(mu, pi):
            if "exact" in name:
                view = dv.exact_view(mu, pi, jnp.full(mu.shape[:1], 3))
            elif "binary" in name:
                view = dv.binary_view(mu[:, 3], pi[:, 3])
            else:
                ids = jnp.broadcast_to(jnp.array([0, 1]), (mu.shape[0], 2))
                view = dv.topk_view(ids, mu[:, :2], pi[:, :2], jnp.full(mu.shape[:1], 3), mu[:, 3], pi[:, 3], 4)
            return dv.directional_derivative(view)

        np.testing.assert_allclose(self.variant(rate)(mu[None], pi[None]), [expected], atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vocabulary_of_151936_in_single_precision(dtype):
    rng = np.random.default_rng(0)
    mu, pi = (rng.normal(size=(2, 151_936)) * 3 for _ in range(2))
    mu, pi = (jnp.asarray(x - np.logaddexp.reduce(x, axis=-1, keepdims=True), dtype) for x in (mu, pi))
    tokens = np.array([17, 151_935])
    # From here on, float64 on exactly the rounded numbers.
    log_mu, log_pi = np.asarray(mu, np.float64), np.asarray(pi, np.float64)
    p, q, rows = np.exp(log_mu), np.exp(log_pi), np.arange(2)
    rate = q[rows, tokens] - p[rows, tokens] * q.sum(-1) + np.sum(q * (p - q * p.sum(-1, keepdims=True)), axis=-1)
    view = dv.exact_view(mu, pi, tokens)
    np.testing.assert_allclose(dv.divergence(view), np.sum(p * (log_mu - log_pi), axis=-1), rtol=2e-5)
    local_and_global = dv.directional_derivative(view)
    assert local_and_global.dtype == jnp.float32
    if dtype == "float32":  # bfloat16 probabilities do not sum to 1, and the formula's short form assumes that
        np.testing.assert_allclose(local_and_global, rate, rtol=1e-4, atol=1e-9)


def test_binary_keeps_its_digits_near_one_and_stays_finite_at_one():
    view = dv.binary_view(jnp.float32([-1e-9]), jnp.float32([-0.5]))
    np.testing.assert_allclose(view.log_mu[0, 1], -20.72, atol=5e-3)
    for mu, pi in [(0.9, 1.0), (1.0, 1.0), (1.0, 0.9), (1e-30, 1.0)]:
        seen = dv.binary_view(jnp.log(jnp.float32([mu])), jnp.log(jnp.float32([pi])))
        for kind in KINDS:
            assert np.isfinite(dv.divergence(seen, dv.DIVERGENCES[kind])).all(), (mu, pi, kind)
            assert np.isfinite(dv.directional_derivative(seen, dv.DIVERGENCES[kind])).all(), (mu, pi, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_probabilities_on_either_side_stay_finite(kind):
    log_mu = np.array([np.log(0.6), np.log(0.4), -np.inf], np.float32)
    log_pi = np.array([-np.inf, np.log(0.5), np.log(0.5)], np.float32)
    view = dv.exact_view(log_mu, log_pi, np.int32(1))
    assert np.isfinite(dv.divergence(view, dv.DIVERGENCES[kind]))
    assert np.isfinite(dv.directional_derivative(view, dv.DIVERGENCES[kind]))


def test_a_tail_that_rounding_made_negative_counts_as_empty():
    # Probabilities that sum to 1 + 1e-6, in bfloat16-like sloppiness of the source.
    mu = np.log(np.array([0.7, 0.300001], np.float32))
    pi = np.log(np.array([0.5, 0.500001], np.float32))
    view = dv.topk_view(np.array([0, 1]), mu, pi, np.int32(0), mu[0], pi[0], 100)
    expected = 0.7 * np.log(0.7 / 0.5) + 0.3 * np.log(0.3 / 0.5)
    np.testing.assert_allclose(dv.divergence(view), expected, atol=1e-5)


def test_the_sampled_token_counts_once_inside_and_outside_the_set():
    log_mu = np.log(np.array([0.5, 0.3, 0.2]))
    inside = topk(log_mu, log_mu, 0, 2)
    outside = topk(log_mu, log_mu, 2, 2)
    for view, tokens in ((inside, 3), (outside, 3)):
        np.testing.assert_allclose(np.sum(view.count * view.mu), 1.0, rtol=1e-9)
        assert int(np.sum(view.sampled & (view.count > 0))) == 1
        assert int(np.sum(view.count)) == tokens


def test_bfloat16_inputs_are_widened_before_arithmetic():
    log_mu = jnp.log(jnp.array([0.5, 0.3, 0.2])).astype(jnp.bfloat16)
    view = dv.exact_view(log_mu, log_mu[::-1], jnp.int32(0))
    assert dv.divergence(view).dtype == jnp.float32


def test_divergences_carry_no_gradient():
    def d(z):
        return dv.divergence(dv.exact_view(jax.nn.log_softmax(jnp.ones(4)), jax.nn.log_softmax(z), jnp.int32(1)))

    np.testing.assert_array_equal(jax.grad(d)(jnp.arange(4.0)), np.zeros(4))


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="aggregated or uniform"):
        topk(np.log([0.5, 0.5]), np.log([0.5, 0.5]), 0, 1, tail="middle")
    with pytest.raises(ValueError, match="vocab_size"):
        dv.topk_view(np.array([0]), np.zeros(1), np.zeros(1), np.int32(0), np.float64(0), np.float64(0), 0)
