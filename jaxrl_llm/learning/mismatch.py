"""How far the sampler's log-probs are from the trainer's on the tokens that were drawn."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Over the response tokens of a rollout, with `x = log pi - log mu`.

    Attributes:
      mean, max: of abs(x), nats.
      k3: mean of exp(x) - x - 1, an estimate of KL(mu || pi) from tokens of mu, nats.
      tokens: how many.
    """

    mean: float
    max: float
    k3: float
    tokens: int

    @classmethod
    def of(cls, x: np.ndarray) -> "Mismatch":
        """Of log-ratios float64 [tokens], at least one."""
        return cls(float(np.abs(x).mean()), float(np.abs(x).max()), float((np.expm1(x) - x).mean()), len(x))
