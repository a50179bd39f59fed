"""Tiled statistics against numpy in float64, their gradients against the naive program's, and both on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.ops.fp8 import fake_quant
from jaxrl_llm.ops.token_stats import Layout, token_stats

# Tiles of 128 columns: three of them, the last one overlapping the second by 84.
VOCAB = 300


def inputs(count=13, width=6, vocab=VOCAB, seed=0, scale=2.0):
    rng = np.random.default_rng(seed)
    hidden, unembedding = scale * rng.normal(size=(count, width)), rng.normal(size=(width, vocab))
    tokens, ids = rng.integers(0, vocab, count), rng.integers(0, vocab, (count, 4))
    ids[:, 1], ids[0], tokens[0] = tokens, [0, vocab - 1, 127, 128], vocab - 1  # the sampled one again, and seams
    return hidden, unembedding, tokens, ids


def reference(hidden, unembedding, tokens, ids, temperature):
    logits = hidden.astype(np.float64) @ unembedding.astype(np.float64) / temperature
    logsumexp = np.logaddexp.reduce(logits, axis=-1)
    logprobs = logits - logsumexp[:, None]
    picked = logprobs[np.arange(len(tokens)), tokens]
    return picked, -(np.exp(logprobs) * logprobs).sum(-1), np.take_along_axis(logprobs, ids, axis=-1), logsumexp


def naive(hidden, unembedding, tokens, ids, temperature, fp8="off"):
    """The program that holds [N, V]."""
    logits = fake_quant(hidden @ unembedding, fp8) / temperature
    logprobs = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    picked = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return picked, entropy, jnp.take_along_axis(logprobs, ids, axis=-1), jax.nn.logsumexp(logits, axis=-1)


def tiled(hidden, unembedding, tokens, ids, temperature, **options):
    options = {"chunk_size": 5, "vocab_chunk": 128, "entropy": True, "logsumexp": True} | options
    s = token_stats(hidden, unembedding, tokens, ids=ids, temperature=temperature, **options)
    return s.logprobs, s.entropy, s.topk_logprobs, s.logsumexp


def mixture(program, tokens, ids, temperature):
    """A scalar in which every statistic has another cotangent at every token."""

    def f(hidden, unembedding):
        logprobs, entropy, topk, logsumexp = program(hidden, unembedding, tokens, ids, temperature)
        return jnp.sum(jnp.sin(logprobs) + entropy**2 + jnp.cos(logsumexp)) + jnp.sum(jnp.tanh(topk))

    return jax.jit(jax.value_and_grad(f, (0, 1)))


def assert_trees_close(got, want, rtol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(np.abs(b).max()))


@pytest.mark.parametrize(
    ("count", "chunk", "columns", "temperature"), [(13, 5, 128, 0.6), (7, 7, 300, 2.0), (1, 9, 256, 1.0)]
)
def test_any_tiling_equals_numpy_in_double_precision(count, chunk, columns, temperature):
    with jax.enable_x64(True):
        data = inputs(count)
        got = jax.jit(functools.partial(tiled, temperature=temperature, chunk_size=chunk, vocab_chunk=columns))(*data)
        for value, want in zip(got, reference(*data, temperature), strict=True):
            assert value.dtype == np.float64
            np.testing.assert_allclose(value, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("double", "rtol"), [(True, 1e-10), (False, 1e-5)])
def test_values_and_gradients_equal_the_naive_program(double, rtol):
    with jax.enable_x64(double):
        hidden, unembedding, tokens, ids = map(jnp.asarray, inputs())
        got, want = (mixture(program, tokens, ids, 0.7)(hidden, unembedding) for program in (tiled, naive))
        assert got[0].dtype == (jnp.float64 if double else jnp.float32)
        assert_trees_close(got, want, rtol)


def test_an_embedding_serves_as_it_lies():
    hidden, unembedding, tokens, ids = (jnp.asarray(x) for x in inputs())
    want = mixture(naive, tokens, ids, 0.7)(hidden, unembedding)
    value, (d_hidden, d_embedding) = mixture(functools.partial(tiled, tied=True), tokens, ids, 0.7)(
        hidden, unembedding.T
    )
    assert_trees_close((value, (d_hidden, d_embedding.T)), want, 1e-5)


@pytest.mark.parametrize("scale", [2.0, 30.0])
def test_float32_keeps_its_digits_where_a_token_is_all_but_certain(scale):
    """A log-prob near 0 is a difference of large logits; 30.0 gives logits in the hundreds."""
    hidden, unembedding, tokens, ids = inputs(scale=scale)
    hidden, unembedding = hidden.astype(np.float32), unembedding.astype(np.float32)
    tokens = np.argmax(hidden @ unembedding, axis=-1)
    # The same float32 logits for both: what is compared is the softmax.
    logits = np.eye(13, dtype=np.float32), np.asarray(jnp.matmul(hidden, unembedding))
    got = jax.jit(functools.partial(tiled, temperature=1.0))(*logits, tokens, ids)
    for value, want in zip(got, reference(*logits, tokens, ids, 1.0), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-7)


def test_a_tile_rounds_to_fp8_with_the_scale_of_the_whole_row():
    hidden, unembedding, tokens, ids = map(jnp.asarray, inputs())
    hidden, unembedding = hidden.astype(jnp.float32), unembedding.astype(jnp.float32)
    got = mixture(functools.partial(tiled, fp8="e4m3"), tokens, ids, 0.7)(hidden, unembedding)
    want = mixture(functools.partial(naive, fp8="e4m3"), tokens, ids, 0.7)(hidden, unembedding)
    plain = mixture(naive, tokens, ids, 0.7)(hidden, unembedding)
    assert_trees_close(got, want, 1e-4)
    assert abs(float(plain[0] - want[0])) > 1e-2


def test_only_what_is_asked_for_is_there():
    hidden, unembedding, tokens, _ = inputs()
    stats = functools.partial(token_stats, hidden.astype(np.float32), unembedding.astype(np.float32), tokens)
    got = stats()
    assert got.entropy is None and got.topk_logprobs is None and got.logsumexp is None
    # The entropy's running moment is one more product a tile.
    products = [str(jax.make_jaxpr(functools.partial(stats, entropy=flag))()).count(" mul ") for flag in (False, True)]
    assert products[0] < products[1]


def test_masked_rows_may_hold_anything():
    hidden, unembedding, tokens, ids = inputs()
    hidden, unembedding = hidden.astype(np.float32), unembedding.astype(np.float32)
    mask = np.arange(13) % 3 != 1

    @jax.jit
    def gradient(w, h):
        def loss(w):
            s = token_stats(h, w, tokens, entropy=True, ids=ids, mask=mask, chunk_size=4)
            return jnp.sum(jnp.where(mask, s.logprobs + s.entropy, 0.0))

        return jax.grad(loss)(w)

    broken = np.where(mask[:, None], hidden, np.nan)
    np.testing.assert_array_equal(gradient(unembedding, broken), gradient(unembedding, hidden))


def test_bfloat16_gives_float32_statistics_and_bfloat16_gradients():
    hidden, unembedding, tokens, ids = inputs()
    half = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(unembedding, jnp.bfloat16)
    full = [x.astype(jnp.float32) for x in half]
    value, gradients = mixture(tiled, tokens, ids, 1.0)(*half)
    want, expected = mixture(naive, tokens, ids, 1.0)(*full)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for got, exact in zip(gradients, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        # bfloat16 has 8 bits; sums may lose a few of them to cancellation.
        np.testing.assert_allclose(got.astype(jnp.float32), exact, atol=2e-2 * float(jnp.abs(exact).max()))


def test_the_gradient_never_holds_tokens_by_vocabulary_and_needs_a_twentieth_of_the_memory():
    count, vocab = 2048, 16_384
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((count, 16), (16, vocab))]
    tokens = jnp.zeros(count, jnp.int32)

    def compiled(program):
        f = lambda h, w: jnp.sum(program(h, w, tokens, tokens[:, None], 1.0)[0])  # noqa: E731
        return jax.jit(jax.grad(f, (0, 1))).lower(*shapes).compile()

    lean = compiled(functools.partial(tiled, entropy=False, chunk_size=256, vocab_chunk=2048))
    fat = compiled(naive)
    assert f"[{count},{vocab}]" in fat.as_text()
    assert f"[{count},{vocab}]" not in lean.as_text()
    assert lean.memory_analysis().temp_size_in_bytes < fat.memory_analysis().temp_size_in_bytes / 20


def test_on_a_mesh_the_vocabulary_stays_divided():
    mesh = jax.make_mesh((2, 1, 4), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    hidden, unembedding, tokens, ids = inputs(count=24, vocab=8 * VOCAB)
    hidden, unembedding = hidden.astype(np.float32), unembedding.astype(np.float32)
    want = mixture(naive, tokens, ids, 0.7)(hidden, unembedding)
    rows, columns = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P(None, "tensor"))
    placed = jax.device_put(hidden, rows), jax.device_put(unembedding, columns)
    program = functools.partial(tiled, layout=Layout(mesh))
    compiled = mixture(program, jax.device_put(tokens, rows), jax.device_put(ids, rows), 0.7).lower(*placed).compile()
    assert_trees_close(compiled(*placed), want, 1e-5)
    text = compiled.as_text()
    assert "all-reduce" in text
    for gathering in ("all-gather", "all-to-all", "collective-permute"):
        assert gathering not in text


def test_sizes_that_a_mesh_does_not_divide_stay_whole():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    layout = Layout(mesh)
    assert layout.fit(8, 6) == (("data", "fsdp"), "tensor")
    assert layout.fit(6, 7) == (("data",), None)
    assert layout.fit(7, 7) == ((), None)
    data = inputs(count=3, vocab=17)
    data = [x.astype(np.float32) for x in data[:2]] + [np.minimum(x, 16) for x in data[2:]]
    got = jax.jit(functools.partial(tiled, temperature=1.0, layout=layout))(*data)
    for value, want in zip(got, reference(*data, 1.0), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5)


def test_a_temperature_of_zero_is_refused():
    hidden, unembedding, tokens, _ = inputs()
    with pytest.raises(ValueError, match="temperature is 0"):
        token_stats(hidden, unembedding, tokens, temperature=0.0)
    with pytest.raises(ValueError, match="a tile needs each above 0"):
        token_stats(hidden, unembedding, tokens, chunk_size=0)
