"""Every attention kernel against the softmax written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxrl_llm.models import kernels


def inputs(length, width, heads=4, kv_heads=2):
    """q, k, v, and rows of two segments between padding."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, n, width)), jnp.float32) for n in (heads, kv_heads, kv_heads))
    ids = np.zeros((2, length), np.int32)
    ids[0, 2 : length // 2], ids[0, length // 2 : -1], ids[1, : length - 3] = 1, 2, 1
    return q, k, v, ids


def causal(ids):
    length = ids.shape[1]
    return (ids[:, :, None] == ids[:, None]) & np.tril(np.ones((length, length), bool))


def value_and_gradients(f, real, *arrays):
    """Of a weighted sum over the tokens that somebody reads."""
    weights = jnp.where(real[:, :, None, None], jnp.cos(jnp.arange(arrays[0].size)).reshape(arrays[0].shape), 0)
    return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(weights * f(*x)), (0, 1, 2)))(*arrays)


def written_out(mask):
    def f(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bshd->bhqs", q, k) / np.sqrt(q.shape[-1])
        return jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1), v)

    return f


def same(ours, theirs, tolerance=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), ours, theirs)


@pytest.mark.parametrize(("length", "block"), [(8, 4), (23, 4), (24, 4)])
def test_blocks_of_queries_equal_the_whole_and_so_do_gradients(length, block):
    q, k, v, _ = inputs(length, 4)
    rng = np.random.default_rng(1)
    mask = np.tril(np.ones((length, length), bool))[None] & (rng.random((2, 1, length)) < 0.8)
    mask |= np.eye(length, dtype=bool)
    real = np.ones((2, length), bool)
    ours = value_and_gradients(lambda q, k, v: kernels.masked_attention(q, k, v, mask, block), real, q, k, v)
    same(ours, value_and_gradients(written_out(mask), real, q, k, v))


@pytest.mark.parametrize("block", [4, 64])
def test_a_token_sees_the_earlier_ones_of_its_segment(block):
    q, k, v, ids = inputs(23, 4)
    ours = value_and_gradients(lambda *x: kernels.causal_attention(*x, ids, "xla", block), ids > 0, q, k, v)
    same(ours, value_and_gradients(written_out(causal(ids)), ids > 0, q, k, v))


def test_flash_attention_of_tpus_equals_the_softmax():
    # Interpreted here. Longer than a block, not a multiple of it.
    q, k, v, ids = inputs(130, 16, 2, 1)
    ours = value_and_gradients(lambda *x: kernels.causal_attention(*x, ids, "splash"), ids > 0, q, k, v)
    same(ours, value_and_gradients(written_out(causal(ids)), ids > 0, q, k, v), 1e-4)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_flash_attention_divides_rows_and_heads_over_the_mesh(kv_heads):
    q, k, v, ids = inputs(20, 16, 4, kv_heads)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 1, 2), ("data", "fsdp", "tensor"))
    with jax.set_mesh(mesh):
        ours = value_and_gradients(lambda *x: kernels.causal_attention(*x, ids, "splash"), ids > 0, q, k, v)
    same(ours, value_and_gradients(written_out(causal(ids)), ids > 0, q, k, v), 1e-4)


@pytest.mark.parametrize(
    ("kernel", "length", "block"), [("xla", 24, 4), pytest.param("splash", 260, 0, marks=pytest.mark.slow)]
)
def test_devices_attend_with_queries_of_their_own(kernel, length, block):
    q, k, v, ids = inputs(length, 16, 2, 1)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 1, 2, 2), ("data", "fsdp", "sequence", "tensor"))
    with jax.set_mesh(mesh):
        ours = value_and_gradients(lambda *x: kernels.causal_attention(*x, ids, kernel, block), ids > 0, q, k, v)
    same(ours, value_and_gradients(written_out(causal(ids)), ids > 0, q, k, v), 1e-4)


def test_the_gpus_kernel_is_refused_in_float32():
    q, k, v, ids = inputs(8, 8)
    with pytest.raises(ValueError, match=r"config\.model\.attention = 'cudnn' computes in bfloat16"):
        kernels.causal_attention(q, k, v, ids, "cudnn")
