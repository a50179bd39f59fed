"""Checksums of arrays against the same sum in Python integers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.records.fingerprint import fingerprints


def by_hand(x: np.ndarray) -> int:
    words = np.frombuffer(x.tobytes(), f"<u{x.dtype.itemsize}")
    return sum(int(word) * (2 * i + 1) for i, word in enumerate(words)) % 2**32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "int8", "uint16", "bool"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5)])
def test_equals_the_sum_in_python(dtype, shape):
    x = np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=shape) * 40, dtype))
    assert fingerprints({"x": jnp.asarray(x)}) == {"x": by_hand(x)}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 23), st.integers(0, 31))
def test_every_flipped_bit_shows(index, bit):
    x = np.random.default_rng(1).normal(size=24).astype(np.float32)
    flipped = x.view(np.uint32).copy()
    flipped[index] ^= np.uint32(1 << bit)
    assert fingerprints({"x": jnp.asarray(x.reshape(4, 6))}) != fingerprints(
        {"x": jax.lax.bitcast_convert_type(jnp.asarray(flipped), jnp.float32).reshape(4, 6)}
    )


def test_division_over_devices_does_not_show():
    x = np.random.default_rng(2).normal(size=(8, 6)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    values = {
        spec: fingerprints({"x": jax.device_put(x, NamedSharding(mesh, spec))})["x"] for spec in (P(), P("a", "b"))
    }
    chex.assert_equal(values, {P(): by_hand(x), P("a", "b"): by_hand(x)})


def test_nan_payload_shows():
    quiet = np.array([0x7FC00000], np.uint32).view(np.float32)
    other = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert fingerprints({"x": quiet}) != fingerprints({"x": other})
