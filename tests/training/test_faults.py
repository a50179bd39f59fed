"""Whole runs that are stopped and killed: what a resumed run repeats, with everything on that it must remember."""

import pathlib
import random
import subprocess
import sys
import time

import pytest

from tests import tiny_runs as tiny

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
    command, parts = [sys.executable, "-m", "tests.tiny_runs"], tmp_path / "parts"
    subprocess.run([*command, str(tmp_path / "whole")], check=True, timeout=900, capture_output=True)
    draw, killed = random.Random(7), 0
    for written, delay in ((0, draw.uniform(2, 6)), *((n, draw.uniform(0, 0.5)) for n in (1, 2, 3))):
        process = start(command, parts)
        while process.poll() is None and lines(parts / "metrics.jsonl") < written:
            time.sleep(0.02)
        time.sleep(delay)
        killed += process.poll() is None
        process.kill()
        process.wait()
    assert killed >= 3
    process = start(command, parts)
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    assert tiny.rows(parts) == tiny.rows(tmp_path / "whole")
    tiny.same_arrays(*(tiny.arrays(tmp_path / name, 4) for name in ("parts", "whole")))


def start(command: list[str], run_dir: pathlib.Path) -> subprocess.Popen:
    resume = ["--resume"] if (run_dir / "config.json").exists() else []
    return subprocess.Popen([*command, str(run_dir), *resume], stderr=subprocess.PIPE, text=True)


def lines(path: pathlib.Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0
