"""What a response's length does to its reward and its place in the loss. Lengths are in tokens, never in characters."""

from typing import Literal

import numpy as np

from jaxrl_llm import schema

Truncated = Literal["zero", "keep", "mask"]


def soft_overlong(lengths: np.ndarray, max_length: int, buffer: int) -> np.ndarray:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13).

    It is 0 up to `max_length - buffer` tokens, falls linearly to -1 at `max_length`, and stays there.

    Args:
      lengths: int [B], tokens of each response, its end token included.
      max_length: tokens at which the punishment is full.
      buffer: tokens over which it grows.

    Returns:
      float64 [B], in [-1, 0].
    """
    schema.require(0 < buffer <= max_length, "buffer", buffer, f"between 1 and max_length = {max_length}")
    lengths = np.asarray(lengths, np.float64)
    return np.clip((max_length - buffer - lengths) / buffer, -1.0, 0.0)


def loss_rows(policy: Truncated, truncated: np.ndarray) -> np.ndarray:
    """The responses that carry loss: "mask" leaves truncated ones out (DAPO's overlong filtering).

    A masked response keeps its reward, so its group's mean and deviation stay what the policy earned; its tokens leave
    numerator and denominator of the loss alike. Takes and returns bool [B], of numpy or JAX.
    """
    return ~(truncated & (policy == "mask"))
