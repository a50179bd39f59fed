"""Every closed-form gradient weight of the papers against autodiff of the loss, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import objectives
from jaxrl_llm.objectives import effective_weight
from jaxrl_llm.objectives.inputs import LossInputs, sanitize


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def build(name, **hyper):
    return objectives.build({"name": name, name: hyper})


def gradient(loss, log_pi, log_mu, advantage):
    """dL / d log pi of one token, by autodiff."""

    def value(x):
        one = lambda v: jnp.reshape(jnp.asarray(v, jnp.float64), (1, 1))  # noqa: E731
        inputs = LossInputs(one(x), one(log_mu), one(advantage), jnp.ones((1, 1), bool), old_logprobs=one(log_mu))
        return loss.token_loss(sanitize(inputs, loss.anchor)).loss[0, 0]

    return float(jax.grad(value)(jnp.float64(log_pi)))


# log-probs from probabilities near 0 to near 1, advantages of both signs and 0.
LOGPROB = st.floats(-12.0, -1e-7)
ADVANTAGE = st.sampled_from([-3.0, -1.0, -0.2, 0.0, 0.4, 1.0, 2.5])
THRESHOLD = st.sampled_from([0.05, 0.15, 0.5, 12.5])


def s(a, x):
    return np.sign(a * x)


# name, hyperparameters from a threshold d -> (weight of (mu, pi, A, d)); the gradient is -A r w.
WEIGHTS = {
    "pg_is": (lambda d: {}, lambda mu, pi, a, d: 1.0),
    "spo": (lambda d: {"eps": d}, lambda mu, pi, a, d: 1 - s(a, pi / mu - 1) * abs(pi / mu - 1) / d),
    "drpo": (lambda d: {"delta": d}, lambda mu, pi, a, d: 1 - s(a, pi / mu - 1) * abs(pi - mu) / d),
    "drpo_chi2": (lambda d: {"delta": d}, lambda mu, pi, a, d: 1 - s(a, pi / mu - 1) * abs(pi / mu - 1) / d),
    "drpo_kl": (lambda d: {"delta": d}, lambda mu, pi, a, d: 1 - np.sign(a) * (1 - mu / pi) / d),
    "drpo_tv": (lambda d: {"delta": d}, lambda mu, pi, a, d: 1 - s(a, pi / mu - 1) * mu / d),
    "mask_drpo": (
        lambda d: {"delta": d},
        lambda mu, pi, a, d: 1.0 if abs(pi - mu) <= d else 1 - s(a, pi / mu - 1) * abs(pi - mu) / d,
    ),
    "ppo_clip": (
        lambda d: {"eps_low": min(d, 0.9), "eps_high": d},
        lambda mu, pi, a, d: float(not ((a > 0 and pi / mu > 1 + d) or (a < 0 and pi / mu < 1 - min(d, 0.9)))),
    ),
    "dppo": (
        lambda d: {"divergence": "binary_tv", "delta_low": d, "delta_high": d},
        lambda mu, pi, a, d: float(not (abs(pi - mu) > d and a * (pi / mu - 1) > 0)),
    ),
    "pdm": (
        lambda d: {"view": "binary", "delta_low": d, "delta_high": d},
        # On two points D_dot = (pi - mu) 2 (1 - pi): predictive and ratio directions agree.
        lambda mu, pi, a, d: float(
            not (mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi)) > d and a * (pi - mu) > 0)
        ),
    ),
}


@pytest.mark.parametrize("name", sorted(WEIGHTS))
@settings(max_examples=40, deadline=None)
@given(log_mu=LOGPROB, log_pi=LOGPROB, advantage=ADVANTAGE, threshold=THRESHOLD)
def test_closed_form_weight_equals_autodiff(name, log_mu, log_pi, advantage, threshold):
    hyper, weight = WEIGHTS[name]
    loss = build(name, **hyper(threshold))
    mu, pi = np.exp(log_mu), np.exp(log_pi)
    shift, ratio = abs(pi - mu), pi / mu
    # On a boundary one ulp decides; those draws say nothing about the formula.
    if min(abs(shift - threshold), abs(ratio - 1 - threshold), abs(ratio - 1 + min(threshold, 0.9))) < 1e-9:
        return
    expected = -advantage * ratio * weight(mu, pi, advantage, threshold)
    np.testing.assert_allclose(gradient(loss, log_pi, log_mu, advantage), expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(log_mu=LOGPROB, log_pi=LOGPROB, advantage=ADVANTAGE)
def test_drpo_without_advantage_weighting(log_mu, log_pi, advantage):
    loss = build("drpo_unweighted", delta=0.15)
    mu, pi = np.exp(log_mu), np.exp(log_pi)
    pull = (pi - mu) / 0.15 * (pi / mu) if advantage else 0.0
    np.testing.assert_allclose(
        gradient(loss, log_pi, log_mu, advantage), -advantage * pi / mu + pull, rtol=1e-9, atol=1e-12
    )


@settings(max_examples=40, deadline=None)
@given(log_mu=LOGPROB, log_pi=LOGPROB, advantage=ADVANTAGE)
def test_weights_on_log_probs(log_mu, log_pi, advantage):
    """Objectives whose gradient goes through log pi, or through the log-ratio."""
    r, rho = np.exp(log_pi - log_mu), log_pi - log_mu
    cases = {
        "reinforce": -advantage,
        "cispo": -advantage * min(r, 3.0),
        "grpo_or": -2 * np.sign(advantage) * max(0.0, 0.2 - np.sign(advantage) * rho),
    }
    for name, expected in cases.items():
        np.testing.assert_allclose(
            gradient(build(name), log_pi, log_mu, advantage), expected, rtol=1e-9, atol=1e-12, err_msg=name
        )


@pytest.mark.parametrize(
    ("advantage", "mu", "pi", "expected"), [(1, 0.4, 0.6, 0.5), (-1, 0.4, 0.6, 3.5), (1, 0.4, 0.3, -1.25)]
)
def test_drpo_worked_values(advantage, mu, pi, expected):
    assert gradient(build("drpo", delta=0.15), np.log(pi), np.log(mu), advantage) == pytest.approx(expected, abs=1e-9)


def test_effective_weight_is_the_factor_in_the_gradient():
    log_mu, log_pi = np.log(np.array([[0.4, 0.4, 0.01]])), np.log(np.array([[0.6, 0.3, 0.3]]))
    advantages = np.array([[1.0, 1.0, 0.0]])
    weight = effective_weight(build("drpo", delta=0.15), log_pi, log_mu, advantages)
    np.testing.assert_allclose(weight, [[1 - 0.2 / 0.15, 1 + 0.1 / 0.15, 0.0]], rtol=1e-9)


def test_gspo_gradient_is_the_sequence_ratio_spread_over_its_tokens():
    log_pi, log_mu = jnp.log(jnp.array([[0.5, 0.2]])), jnp.log(jnp.array([[0.4, 0.3]]))
    loss = build("gspo", eps_low=0.5, eps_high=0.5)

    def value(x):
        inputs = LossInputs(x, log_mu, jnp.ones((1, 2)), jnp.ones((1, 2), bool))
        terms = loss(inputs)
        return terms.numerator / terms.denominator

    ratio = np.sqrt(0.5 / 0.4 * 0.2 / 0.3)
    np.testing.assert_allclose(value(log_pi), -ratio, rtol=1e-12)
    np.testing.assert_allclose(jax.grad(value)(log_pi), [[-ratio / 2, -ratio / 2]], rtol=1e-12)


def test_identities_between_objectives():
    rng = np.random.default_rng(0)
    for _ in range(50):
        log_mu, log_pi, advantage = -rng.exponential(2), -rng.exponential(2), rng.normal()
        wide, plain = build("drpo", delta=1e9), build("pg_is")
        np.testing.assert_allclose(
            gradient(wide, log_pi, log_mu, advantage), gradient(plain, log_pi, log_mu, advantage), rtol=1e-7
        )
        # With mu = 1 the shift is |r - 1|: DRPO is SPO with eps = delta.
        np.testing.assert_allclose(
            gradient(build("drpo", delta=0.3), log_pi, 0.0, advantage),
            gradient(build("spo", eps=0.3), log_pi, 0.0, advantage),
            rtol=1e-12,
        )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_output_reset_is_c1_at_its_margin_and_ppo_clip_is_not(advantage):
    step, sign = 1e-7, np.sign(advantage)
    margin = build("grpo_or", alpha=0.2)
    sides = [gradient(margin, -3 + sign * 0.2 + d, -3.0, advantage) for d in (-step, step)]
    np.testing.assert_allclose(sides, 0.0, atol=1e-6)
    clip = build("ppo_clip", eps_low=0.2, eps_high=0.2)
    edge = np.log(1 + sign * 0.2)
    inside, outside = (gradient(clip, -3 + edge - sign * d, -3.0, advantage) for d in (step, -step))
    assert outside == 0.0
    assert abs(inside) > 0.5


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    loss = build("ppo_clip", dual_clip=3.0)
    assert gradient(loss, np.log(0.5), np.log(0.1), -1.0) == 0.0  # r = 5 > c
    assert gradient(loss, np.log(0.2), np.log(0.1), -1.0) == pytest.approx(2.0)
    assert gradient(build("ppo_clip"), np.log(0.5), np.log(0.1), -1.0) == pytest.approx(5.0)


def test_ratio_cap_bounds_the_weight_but_not_the_direction():
    loss = build("pg_is", ratio_cap=2.0)
    assert gradient(loss, np.log(0.5), np.log(0.1), 1.0) == pytest.approx(-2.0)
    assert gradient(loss, np.log(0.15), np.log(0.1), 1.0) == pytest.approx(-1.5)
