"""Chunked statistics against numpy in float64, and their gradients against the naive program's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.ops.token_stats import token_stats


def inputs(count=13, width=6, vocab=17, seed=0):
    rng = np.random.default_rng(seed)
    hidden, unembedding = rng.normal(size=(count, width)), rng.normal(size=(width, vocab))
    return hidden, unembedding, rng.integers(0, vocab, count), rng.integers(0, vocab, (count, 4))


def reference(hidden, unembedding, tokens, ids, temperature):
    logits = hidden @ unembedding / temperature
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    rows = np.arange(len(tokens))
    return logprobs[rows, tokens], -(np.exp(logprobs) * logprobs).sum(-1), np.take_along_axis(logprobs, ids, axis=-1)


@settings(max_examples=15, deadline=None)
@given(count=st.integers(1, 20), chunk=st.integers(1, 24), temperature=st.sampled_from([1.0, 0.6, 2.0]))
def test_any_chunking_equals_numpy_in_double_precision(count, chunk, temperature):
    with jax.enable_x64(True):
        hidden, unembedding, tokens, ids = inputs(count)
        got = token_stats(hidden, unembedding, tokens, temperature=temperature, entropy=True, ids=ids, chunk_size=chunk)
        expected = reference(hidden, unembedding, tokens, ids, temperature)
        for value, want in zip((got.logprobs, got.entropy, got.topk_logprobs), expected, strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-10, atol=1e-12)


def test_gradients_equal_the_naive_program():
    with jax.enable_x64(True):
        hidden, unembedding, tokens, ids = map(jnp.asarray, inputs())

        def chunked(h, w):
            s = token_stats(h, w, tokens, temperature=0.7, entropy=True, ids=ids, chunk_size=4)
            return jnp.sum(jnp.sin(s.logprobs) + s.entropy**2) + jnp.sum(jnp.cos(s.topk_logprobs))

        def naive(h, w):
            p = jax.nn.log_softmax(h @ w / 0.7)
            entropy = -jnp.sum(jnp.exp(p) * p, axis=-1)
            picked = jnp.sin(p[jnp.arange(13), tokens]) + entropy**2
            return jnp.sum(picked) + jnp.sum(jnp.cos(jnp.take_along_axis(p, ids, axis=-1)))

        for got, want in zip(
            jax.grad(chunked, (0, 1))(hidden, unembedding), jax.grad(naive, (0, 1))(hidden, unembedding), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_only_what_is_asked_for_is_there():
    hidden, unembedding, tokens, _ = inputs()
    got = token_stats(hidden.astype(np.float32), unembedding.astype(np.float32), tokens)
    assert got.entropy is None
    assert got.topk_logprobs is None


def test_masked_rows_may_hold_anything():
    hidden, unembedding, tokens, ids = inputs()
    hidden, unembedding = hidden.astype(np.float32), unembedding.astype(np.float32)
    mask = np.arange(13) % 3 != 1

    def loss(w, h):
        s = token_stats(h, w, tokens, entropy=True, ids=ids, mask=mask, chunk_size=4)
        return jnp.sum(jnp.where(mask, s.logprobs + s.entropy, 0.0))

    broken = np.where(mask[:, None], hidden, np.nan)
    np.testing.assert_array_equal(jax.grad(loss)(unembedding, broken), jax.grad(loss)(unembedding, hidden))


def test_bfloat16_gives_float32_statistics():
    hidden, unembedding, tokens, _ = inputs()
    got = token_stats(jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(unembedding, jnp.bfloat16), tokens)
    assert got.logprobs.dtype == jnp.float32


def test_the_chunked_gradient_needs_less_memory_than_the_naive_one():
    hidden, unembedding = jnp.zeros((2048, 16)), jnp.zeros((16, 5000))
    tokens = jnp.zeros(2048, jnp.int32)

    def temporary(chunk):
        f = lambda h, w: jnp.sum(token_stats(h, w, tokens, chunk_size=chunk).logprobs)  # noqa: E731
        return jax.jit(jax.grad(f, (0, 1))).lower(hidden, unembedding).compile().memory_analysis().temp_size_in_bytes

    assert temporary(64) < temporary(2048) / 8


def test_a_temperature_of_zero_is_refused():
    hidden, unembedding, tokens, _ = inputs()
    with pytest.raises(ValueError, match="temperature is 0"):
        token_stats(hidden, unembedding, tokens, temperature=0.0)
