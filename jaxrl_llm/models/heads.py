"""Scalar outputs on a decoder's final hidden states: a critic's values, a reward model's scores."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder


class ScalarHead(nnx.Module):
    """`hidden @ kernel`, kernel [D, 1] without bias, in float32. It begins at 0: no opinion until it has learned one."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None = None):
        del rngs  # taken because every module takes it; nothing here is random
        self.kernel = nnx.Param(jnp.zeros((config.hidden_size, 1), config.param_dtype))

    def __call__(self, hidden: chex.Array) -> jax.Array:
        """float32 [...] from [..., D], hidden states after the final norm."""
        kernel = self.kernel[...].astype(jnp.float32)
        return jnp.matmul(hidden.astype(jnp.float32), kernel, precision="highest")[..., 0]


class ScalarModel(nnx.Module):
    """A decoder with a scalar at every token in place of the unembedding.

    The same computation as transformers' `*ForSequenceClassification` with one label.

    Attributes:
      trunk: the decoder; it has no unembedding of its own.
      score: the head.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.trunk = Decoder(dataclasses.replace(config, tie_word_embeddings=True), rngs=rngs)
        self.score = ScalarHead(config)

    def __call__(self, tokens: chex.Array, positions: chex.Array, segment_ids: chex.Array) -> jax.Array:
        """float32 [B, L], the scalar at each token; arguments as `Decoder.hidden`."""
        return self.score(self.trunk.hidden(tokens, positions, segment_ids))


def last_valid(scores: chex.Array, mask: chex.Array) -> jax.Array:
    """The score at the last True position of each row.

    Args:
      scores: float [B, L].
      mask: bool [B, L], at least one True a row, wherever the padding stands.

    Returns:
      float [B].
    """
    chex.assert_equal_shape([scores, mask])
    last = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    return jnp.take_along_axis(scores, last[:, None], axis=1)[:, 0]
