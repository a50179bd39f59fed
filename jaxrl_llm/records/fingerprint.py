"""Checksums of arrays, to tell a checkpoint with flipped bits from a whole one.

Storage formats check their indices but not always the numbers themselves. A checksum taken on the devices costs one
read of the arrays, and does not depend on how they are divided over the mesh, since it is a sum of integers.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import processes

WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def fingerprints(arrays: dict[str, jax.Array]) -> dict[str, int]:
    """The checksum of every array: the sum of its words, each times an odd number of its own, modulo 2^32.

    A flipped bit always changes it: an odd multiple of a power of two below 2^32 is not 0. The factors make exchanged
    words show as well, save by coincidence.

    Args:
      arrays: name -> array of any shape and dtype.

    Returns:
      name -> integer below 2^32.
    """
    return {name: int(value) for name, value in processes.fetch(_fingerprints(arrays)).items()}


@jax.jit
def _fingerprints(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _fingerprint(jnp.asarray(array)) for name, array in arrays.items()}


def _fingerprint(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize]).astype(jnp.uint32)
    # The position is put together axis by axis: flattening a divided array would move it between devices.
    position = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride)
    return jnp.sum(words * (2 * position + 1), dtype=jnp.uint32)
