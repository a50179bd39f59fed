"""Collapse by hand-made rows."""

import math

import pytest

from jaxrl_llm.config import EarlyStop
from jaxrl_llm.training.early_stop import collapsed


def stops(config, rows):
    """Number of the row at which the run stops, and why; the counts survive a JSON-like copy each time."""
    beyond = {}
    for number, row in enumerate(rows, 1):
        beyond, why = collapsed(config, dict(beyond), row)
        if why:
            return number, why
    return None


def test_needs_consecutive_rollouts():
    config = EarlyStop(rollouts=3, reward_below=0.1)
    values = [0.0, 0.0, 0.1, 0.05, 0.0, 0.0, 0.5]
    number, why = stops(config, [{"reward/mean": v} for v in values])
    assert number == 6
    assert why == "reward/mean was below 0.1 for 3 rollouts in a row (0 in the last)"


@pytest.mark.parametrize(
    ("field", "metric", "value", "side"),
    [("entropy_below", "entropy", 0.2, "below"), ("truncated_above", "response/truncated", 0.4, "above")],
)
def test_each_bound_watches_its_metric(field, metric, value, side):
    config = EarlyStop(rollouts=2, **{field: 0.3})
    assert stops(config, [{metric: value}] * 2) == (
        2,
        f"{metric} was {side} 0.3 for 2 rollouts in a row ({value} in the last)",
    )
    assert stops(config, [{metric: 0.3}] * 5) is None


def test_what_is_not_a_number_is_no_collapse():
    config = EarlyStop(rollouts=1, reward_below=0.1)
    assert stops(config, [{}, {"reward/mean": math.nan}, {"reward/mean": None}]) is None


def test_by_default_nothing_stops_a_run():
    row = {"reward/mean": -1e6, "entropy": 0.0, "response/truncated": 1.0}
    assert stops(EarlyStop(), [row] * 100) is None
    assert stops(EarlyStop(rollouts=1), [row] * 100) is None
