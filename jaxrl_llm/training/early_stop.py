"""Whether a run has collapsed: a number beyond its bound for several rollouts in a row."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config import EarlyStop

# The bound's field -> the metric, and the sign of the side that is bad.
BOUNDS = {
    "reward_below": ("reward/mean", -1),
    "entropy_below": ("entropy", -1),
    "truncated_above": ("response/truncated", 1),
}


def collapsed(config: EarlyStop, beyond: Mapping[str, int], row: Mapping[str, Any]) -> tuple[dict[str, int], str]:
    """Counts, for each bound, the rollouts in a row beyond it.

    Args:
      config: the bounds.
      beyond: the counts after the rollout before; empty at first.
      row: this rollout's metrics. One that is missing or NaN is not beyond its bound.

    Returns:
      The counts now, and why the run should stop, or "".
    """
    now, why = {}, ""
    if config.rollouts == 0:
        return now, why
    for field, (metric, sign) in BOUNDS.items():
        bound, value = getattr(config, field), row.get(metric)
        bad = value is not None and sign * (value - bound) > 0
        now[field] = beyond.get(field, 0) + 1 if bad else 0
        if now[field] >= config.rollouts and not why:
            side = "above" if sign > 0 else "below"
            why = f"{metric} was {side} {bound:g} for {now[field]} rollouts in a row ({value:.4g} in the last)"
    return now, why
