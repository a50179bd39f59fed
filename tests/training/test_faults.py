"""Whole runs that are stopped and killed: what a resumed run repeats, with everything on that it must remember."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from rich.console import Console

from tests.training import tiny

pytestmark = pytest.mark.slow

# Sampling that lags, refilled groups and a reference in the loss; a critic, and a KL in the reward that is steered.
ON = {
    "lagging": {},
    "critic": {
        "objective__name": "ppo_or",
        "rollout__staleness": 0,
        "rollout__refill_rounds": 0,
        "kl__reward": 0.05,
        "kl__target": 0.01,
    },
}


class Interrupt(Console):
    """Sends SIGTERM once, when the loop begins."""

    sent = False

    def print(self, *objects, **options):
        super().print(*objects, **options)
        if not Interrupt.sent and "before RL" in str(objects[0] if objects else ""):
            Interrupt.sent = True
            threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGTERM)).start()


def same_arrays(one, other):
    leaves, structure = jax.tree.flatten(one)
    others, same = jax.tree.flatten(other)
    assert structure == same
    for a, b in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("features", sorted(ON))
def test_a_stopped_run_repeats_what_an_uninterrupted_one_did(tmp_path, features):
    tiny.run(tiny.config(tmp_path / "whole", **ON[features]))
    config = tiny.config(tmp_path / "parts", **ON[features])
    Interrupt.sent = False
    result, text = tiny.run(config, console=Interrupt)
    assert result is None and "go on with --resume" in text
    assert len(tiny.rows(tmp_path / "parts")) < 5
    tiny.run(config, resume=True)
    assert tiny.rows(tmp_path / "parts") == tiny.rows(tmp_path / "whole")
    same_arrays(*(tiny.arrays(tmp_path / name, 4) for name in ("parts", "whole")))


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(tmp_path):
    """SIGKILL at random moments, saves included (one after every rollout); metrics without a torn or doubled row."""
    command = [sys.executable, "-m", "tests.training.tiny"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, timeout=900, capture_output=True)
    started = time.monotonic()
    killed = 0
    for delay in (*random.Random(7).choices(range(3, 60), k=3), None):
        resume = ["--resume"] if (tmp_path / "parts" / "config.json").exists() else []
        process = subprocess.Popen([*command, str(tmp_path / "parts"), *resume], stderr=subprocess.PIPE, text=True)
        try:
            _, errors = process.communicate(timeout=delay or 900)
            assert process.returncode == 0, errors
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    assert killed, f"no run was killed within {time.monotonic() - started:.0f} s; shorten the delays"
    assert tiny.rows(tmp_path / "parts") == tiny.rows(tmp_path / "whole")
    same_arrays(*(tiny.arrays(tmp_path / name, 4) for name in ("parts", "whole")))
