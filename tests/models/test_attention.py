"""Attention in blocks of queries against the softmax written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import attention


@pytest.mark.parametrize(("length", "block"), [(8, 4), (23, 4), (24, 4)])
def test_blocks_of_queries_equal_the_whole_and_so_do_gradients(length, block):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, heads, 4)), jnp.float32) for heads in (4, 2, 2))
    mask = np.tril(np.ones((length, length), bool))[None] & (rng.random((2, 1, length)) < 0.8)
    mask |= np.eye(length, dtype=bool)

    def written_out(q, k, v):
        k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
        scores = jnp.where(mask[:, None], jnp.einsum("bqhd,bshd->bhqs", q, k) / 2, -jnp.inf)
        return jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(scores, axis=-1), v)

    def both(f):
        weights = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(weights * f(*x)), (0, 1, 2)))(q, k, v)

    blocks = both(lambda q, k, v: attention(q, k, v, jnp.asarray(mask), block=block))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), blocks, both(written_out))
