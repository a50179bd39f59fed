"""D and D_dot over the whole vocabulary against numpy from the equations, and on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives import divergence as dv
from jaxrl_llm.ops.exact_divergence import exact_divergence
from jaxrl_llm.ops.token_stats import Layout

COUNT, VOCAB = 12, 300
TILES = {"chunk_size": 5, "vocab_chunk": 128}


def sources(dtype=np.float64):
    """Two policies of different width, so that neither can stand in for the other."""
    rng = np.random.default_rng(0)
    behavior = rng.normal(size=(COUNT, 6)).astype(dtype), rng.normal(size=(6, VOCAB)).astype(dtype)
    policy = rng.normal(size=(COUNT, 9)).astype(dtype), rng.normal(size=(9, VOCAB)).astype(dtype)
    return behavior, policy, rng.integers(0, VOCAB, COUNT)


def logprobs(source, temperature):
    logits = source[0] @ source[1] / temperature
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def expected_kl(behavior, policy, tokens, temperature):
    """KL(mu || pi) and (pi_k - mu_k) + sum_i pi_i (mu_i - pi_i)."""
    log_mu, log_pi = logprobs(behavior, temperature), logprobs(policy, temperature)
    mu, pi, rows = np.exp(log_mu), np.exp(log_pi), np.arange(COUNT)
    local = pi[rows, tokens] - mu[rows, tokens]
    return (mu * (log_mu - log_pi)).sum(-1), local + (pi * (mu - pi)).sum(-1)


def test_kl_and_its_rate_follow_the_equations():
    with jax.enable_x64(True):
        behavior, policy, tokens = sources()
        got = jax.jit(functools.partial(exact_divergence, temperature=0.7, **TILES))(behavior, policy, tokens)
        for value, want in zip(got, expected_kl(behavior, policy, tokens, 0.7), strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["reverse_kl", "tv", "jensen_shannon"])
def test_the_rate_is_the_derivative_through_the_softmax(name):
    """jax.jvp of D along onehot(k) - pi, with D from its definition."""
    define = {
        "reverse_kl": lambda mu, pi: jnp.sum(pi * jnp.log(pi / mu), -1),
        "tv": lambda mu, pi: 0.5 * jnp.sum(jnp.abs(mu - pi), -1),
        "jensen_shannon": lambda mu, pi: (
            0.5 * jnp.sum(mu * jnp.log(2 * mu / (mu + pi)) + pi * jnp.log(2 * pi / (mu + pi)), -1)
        ),
    }[name]
    with jax.enable_x64(True):
        behavior, policy, tokens = sources()
        mu, z = np.exp(logprobs(behavior, 1.0)), policy[0] @ policy[1]
        direction = jax.nn.one_hot(tokens, VOCAB) - jax.nn.softmax(z)
        want = jax.jvp(lambda z: define(mu, jax.nn.softmax(z)), (z,), (direction,))
        run = jax.jit(functools.partial(exact_divergence, kind=dv.DIVERGENCES[name], **TILES))
        # The policy as logits that exist already.
        for value, expected in zip(run(behavior, z, tokens), want, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12)


def test_a_mesh_and_float32_change_nothing_and_masked_rows_may_hold_anything():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    behavior, policy, tokens = sources(np.float32)
    mask = np.arange(COUNT) != 4
    broken = np.where(mask[:, None], policy[0] @ policy[1], np.nan)
    run = jax.jit(functools.partial(exact_divergence, mask=mask, layout=Layout(mesh), **TILES))
    for value, want in zip(run(behavior, broken, tokens), expected_kl(*sources(), 1.0), strict=True):
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, np.where(mask, want, 0.0), rtol=1e-5, atol=1e-6)


def test_vocabularies_that_differ_are_refused():
    behavior, policy, tokens = sources()
    with pytest.raises(AssertionError):
        exact_divergence(behavior, (policy[0] @ policy[1])[:, :-1], tokens)
