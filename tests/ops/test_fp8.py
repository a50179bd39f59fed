"""FP8 rounding against ml_dtypes, with scales worked out in numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.ops.fp8 import fake_quant, fake_quant_weight

TOP = {"e4m3": (448.0, ml_dtypes.float8_e4m3fn), "e5m2": (57344.0, ml_dtypes.float8_e5m2)}


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_one_scale_per_row(fmt):
    top, dtype = TOP[fmt]
    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32) * 100
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(top)
    expected = np.clip(x / scale, -top, top).astype(dtype).astype(np.float32) * scale
    np.testing.assert_allclose(fake_quant(x, fmt), expected, rtol=1e-6)
    assert np.abs(expected - x).max() > 0


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_the_largest_values_are_clipped_never_nan(fmt):
    assert np.isnan(np.float32(500).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))  # what clipping prevents
    rng = np.random.default_rng(1)
    for magnitude in (1e-30, 1.0, 500.0, 6e4, 1e30):
        x = (rng.normal(size=(100, 7)) * magnitude).astype(np.float32)
        assert np.isfinite(fake_quant(x, fmt)).all()
    np.testing.assert_array_equal(fake_quant(np.zeros((2, 3), np.float32), fmt), 0)


def test_gradients_pass_straight_through():
    x = jnp.linspace(-3, 3, 12).reshape(3, 4)
    np.testing.assert_array_equal(jax.grad(lambda v: jnp.sum(fake_quant(v, "e4m3") * 2))(x), jnp.full((3, 4), 2.0))


def test_off_is_the_array_itself():
    x = jnp.ones((2, 2))
    assert fake_quant(x, "off") is x
    assert fake_quant_weight(x, "off") is x


def test_weights_are_rounded_from_their_bfloat16_copy():
    w = np.random.default_rng(2).normal(size=(48, 16)).astype(np.float32)
    copy = w.astype(ml_dtypes.bfloat16).astype(np.float32)
    scale = np.abs(copy).max(axis=0, keepdims=True) / np.float32(448)
    expected = (copy / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    got = np.asarray(fake_quant_weight(w, "e4m3"))
    # bfloat16 values often lie halfway between two FP8 values, where one ulp in the scale decides: then they are one step apart.
    same = np.isclose(got, expected, rtol=1e-6)
    assert same.mean() > 0.97
    assert (np.abs(got - expected) <= np.abs(copy) / 7)[~same].all()
    master = (w / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    assert np.isclose(got, master, rtol=1e-6).mean() < same.mean()


def test_block_scales_keep_an_outlier_to_its_block():
    w = np.random.default_rng(3).normal(size=(200, 300)).astype(np.float32)
    w[0, 0] = 1e4
    error = np.abs(np.asarray(fake_quant_weight(w, "e4m3", "block")) - w)
    assert error.shape == w.shape
    assert error[128:, 128:].max() < 0.25  # relative spacing of e4m3 is at most 1/8, values stay below 5
    assert error[:128, :128].max() > 0.4  # the outlier's own block is coarse
