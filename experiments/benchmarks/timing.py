"""Timing of things that are compared: they take turns, so that whatever else the machine does hits all alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def take_turns(calls: Sequence[Callable[[], Any]], repetitions: int) -> list[list[float]]:
    """Seconds of each call, [calls][repetitions]; one more turn before, which compiles, is not counted."""
    seconds = [[] for _ in calls]
    for repetition in range(repetitions + 1):
        for call, times in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            if repetition > 0:
                times.append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and largest."""
    return statistics.median(values), min(values), max(values)
