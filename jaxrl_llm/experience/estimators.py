"""Accuracy with its uncertainty: Wilson intervals, intervals over prompts, unbiased pass@k."""

import math
from collections.abc import Sequence

import numpy as np

Z95 = 1.959963984540054  # two-sided 95 % point of the normal distribution


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    p, z2 = successes / trials, Z95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(per_prompt: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean of independent per-prompt scores, by their standard error; within [0, 1] where they all are.

    The prompts are the independent draws, so the k samples of one prompt enter as their average (avg@k).
    """
    scores = np.asarray(per_prompt, np.float64)
    if len(scores) < 2:
        return (float("nan"), float("nan"))
    half = Z95 * scores.std(ddof=1) / math.sqrt(len(scores))
    low, high = float(scores.mean() - half), float(scores.mean() + half)
    shares = scores.min() >= 0 and scores.max() <= 1
    return (max(low, 0.0), min(high, 1.0)) if shares else (low, high)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased probability that one of k of the `samples` is correct: 1 - C(n - c, k) / C(n, k) (Chen 2021, eq. 1).

    Raises:
      ValueError: k above the number of samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@k with k = {k} needs at least that many samples per prompt; there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
