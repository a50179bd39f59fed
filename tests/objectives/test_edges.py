"""Objectives at their edges: values worked by hand in float64, and gradients whose sign must not turn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives.inputs import LossInputs, sanitize
from jaxrl_llm.objectives.penalty import kl_estimate


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def test_the_k3_penalty_never_pushes_away_from_the_reference():
    slope = jax.vmap(jax.grad(_k3))
    x = np.array([-100.0, -20.0, -1.0, 0.0, 1.0, 19.9, 20.1, 30.0, 500.0])
    got = slope(np.full_like(x, -50.0), x)
    # 1 - e^x; beyond 20 that of 20.
    np.testing.assert_allclose(got, 1 - np.exp(np.minimum(x, 20.0)), rtol=1e-9, atol=1e-14)


def _k3(logprob, x):
    reference = jax.lax.stop_gradient(logprob) + x
    return kl_estimate(logprob[None], reference[None], "k3")[0]


@pytest.mark.parametrize("delta", [0.15, 12.5])
@pytest.mark.parametrize("log_ratio", [19.0, 21.0, 40.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_drpo_kl_has_the_sign_of_its_formula_beyond_the_bound(delta, log_ratio, advantage):
    loss = objectives.build({"name": "drpo_kl", "drpo_kl": {"delta": delta}})

    def value(x):
        one = lambda v: jnp.reshape(jnp.asarray(v, jnp.float64), (1, 1))  # noqa: E731
        inputs = LossInputs(one(x), one(-0.5 - log_ratio), one(advantage), jnp.ones((1, 1), bool))
        return loss.token_loss(sanitize(inputs)).loss[0, 0]

    r = np.exp(min(log_ratio, 20.0))
    expected = -advantage * r + abs(advantage) / delta * (r - 1)
    np.testing.assert_allclose(jax.grad(value)(-0.5), expected, rtol=1e-9)
