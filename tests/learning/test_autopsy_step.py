"""The autopsy of one optimizer step against numpy on the whole softmax, token by token."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.learning.autopsy_step import AutopsyStep
from jaxrl_llm.types import TopKView
from tests.learning.test_step import make_batch, make_step

DELTA, VOCAB = 0.5, 19


@pytest.fixture(scope="module")
def batch():
    """A batch whose behaviour policy is known in full (K = V)."""
    batch, rng = make_batch(), np.random.default_rng(5)
    logits = 2 * rng.normal(size=(*batch.response_mask.shape, VOCAB))
    log_mu = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-log_mu, axis=-1)
    at = lambda i: np.take_along_axis(log_mu, i, axis=-1)  # noqa: E731
    return dataclasses.replace(
        batch,
        behavior_logprobs=jnp.asarray(at(np.asarray(batch.response_tokens)[..., None])[..., 0], jnp.float32),
        topk=TopKView(jnp.asarray(ids, jnp.int32), jnp.asarray(at(ids), jnp.float32)),
    ), log_mu


def full_softmax(step, params, batch):
    """float64 log pi [B, T, V] from the model's own hidden states."""
    model = nnx.merge(step.forward.graphdef, params)
    hidden = model.hidden(batch.tokens, batch.positions, batch.segment_ids)
    first = batch.tokens.shape[1] - batch.response_mask.shape[1]
    logits = np.asarray(hidden[:, first - 1 : -1] @ model.unembedding(), np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_the_rates_are_those_counted_token_by_token(batch):
    batch, log_mu = batch
    step, state = make_step("pg_is", micro_batches=2)
    new, metrics = jax.jit(AutopsyStep(step, DELTA))(state, batch)
    chex.assert_trees_all_close(new.params, jax.jit(step)(state, batch)[0].params, rtol=1e-5, atol=1e-6)

    mu = np.exp(log_mu)
    before, after = (full_softmax(step, params, batch) for params in (state.params, new.params))
    tokens, mask, advantages = (np.asarray(x) for x in (batch.response_tokens, batch.response_mask, batch.advantages))
    outside = shrank = 0
    kept, unsafe, contracted = (
        {"ratio": 0, "predictive": 0},
        {"ratio": 0, "predictive": 0},
        {"ratio": 0, "predictive": 0},
    )
    for b, t in zip(*np.nonzero(mask), strict=True):
        d, later = (np.sum(mu[b, t] * (log_mu[b, t] - x[b, t])) for x in (before, after))
        if d <= DELTA:
            continue
        outside += 1
        pi, k = np.exp(before[b, t]), tokens[b, t]
        rate = pi[k] - mu[b, t, k] + np.sum(pi * (mu[b, t] - pi))
        keeps = {
            "ratio": not advantages[b, t] * (pi[k] / mu[b, t, k] - 1) > 0,
            "predictive": not advantages[b, t] * rate > 0,
        }
        if keeps["ratio"] == keeps["predictive"]:
            continue
        shrank += later < d
        for name, keep in keeps.items():
            kept[name] += keep
            unsafe[name] += keep and later > d
            contracted[name] += keep and later < d

    values = {name: (float(m.numerator), float(m.denominator)) for name, m in metrics.items()}
    assert shrank > 0, "the batch must have disputed tokens, or this test shows nothing"
    assert values["autopsy/outside_tokens"] == (outside, 1)
    assert values["autopsy/shrank_tokens"] == (shrank, 1)
    for name in kept:
        assert values[f"autopsy/{name}/unsafe_keep"] == (unsafe[name], kept[name])
        assert values[f"autopsy/{name}/contraction_keep"] == (contracted[name], shrank)
