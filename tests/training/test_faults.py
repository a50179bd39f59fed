"""Whole runs that are stopped and killed: what a resumed run repeats, with everything on that it must remember."""

import random
import subprocess
import sys
import time

import pytest

from tests.training import tiny

pytestmark = pytest.mark.slow


def test_a_stopped_run_with_a_critic_repeats_what_an_uninterrupted_one_did(tmp_path):
    """With a KL in the reward that is steered; the default tests stop one that lags, refills and has it in the loss."""
    fields = {"objective__name": "ppo_or", "objective__penalty__kl": 0.0, "kl__reward": 0.05}
    fields |= {"rollout__staleness": 0, "rollout__refill_rounds": 0}
    tiny.run(tiny.config(tmp_path / "whole", **fields))
    config = tiny.config(tmp_path / "parts", **fields)
    result, text = tiny.run(config, console=tiny.interrupt())
    assert result is None and "go on with --resume" in text
    assert len(tiny.rows(tmp_path / "parts")) < 5
    tiny.run(config, resume=True)
    assert tiny.rows(tmp_path / "parts") == tiny.rows(tmp_path / "whole")
    tiny.same_arrays(*(tiny.arrays(tmp_path / name, 4) for name in ("parts", "whole")))


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
    tiny.same_arrays(*(tiny.arrays(tmp_path / name, 4) for name in ("parts", "whole")))
