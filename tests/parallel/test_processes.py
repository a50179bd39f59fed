"""Several processes of one run on this machine: what they tell each other, and that together they are one run."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from tests import tiny_runs as tiny

ROOT = pathlib.Path(__file__).parents[2]


def start(count, command, devices=4):
    """Starts `count` processes with `devices` devices together; `command(port, index)` gives each one's arguments."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices // count}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env, "cwd": ROOT}
    return [subprocess.Popen([sys.executable, *map(str, command(port, i))], **pipes) for i in range(count)]


def finish(processes, code=0, timeout=900):
    """(stdout, stderr) of every process, each of which must end with `code`."""
    try:
        answers = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, errors) in zip(processes, answers, strict=True):
        assert process.returncode == code, out + errors
    return answers


TALK = textwrap.dedent("""
    import os, signal, sys, time
    import numpy as np
    from jaxrl_llm.parallel import distributed
    port, index = int(sys.argv[1]), int(sys.argv[2])
    with distributed.session(f"localhost:{port}", 2, index, expected=(ValueError,)):
        import jax
        from jaxrl_llm import processes
        from jaxrl_llm.parallel import sharding
        from jaxrl_llm.config import Mesh
        from jaxrl_llm.training.signals import StopSignals
        assert jax.process_count() == 2 and jax.device_count() == 4
        # 64-bit numbers that 32 bits do not hold.
        own = np.array([1 / 3, np.nan, 2.0**60 + index])
        np.testing.assert_array_equal(processes.gather(own), [[1 / 3, np.nan, 2.0**60], [1 / 3, np.nan, 2.0**60 + 1]])
        part = processes.part(5)
        assert (part.start, part.stop) == ((0, 3), (3, 5))[index]
        np.testing.assert_array_equal(processes.gather_parts(np.arange(5.0)[part], 5), np.arange(5.0))
        mesh = sharding.create_mesh(Mesh(data=2, tensor=2))
        whole = np.arange(8, dtype=np.float32).reshape(4, 2)
        rows = sharding.put(whole, sharding.batch_sharding(mesh))
        assert not rows.is_fully_addressable
        for array in (rows, sharding.put(rows, sharding.replicated(mesh)), jax.numpy.asarray(whole)):
            np.testing.assert_array_equal(processes.fetch({"x": array})["x"], whole)
        with StopSignals() as stop:
            assert not stop.agreed()
            if index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            assert stop.agreed() and stop.name == "SIGTERM"
        try:
            processes.agree(OSError("no such disk") if index == 1 else None, "reading")
        except (OSError, processes.OtherProcess) as error:
            print(error, flush=True)
        if index == 1:
            raise ValueError("config.rollout.prompts is 7; it must be even")
        processes.gather(own)  # never comes: the other process has failed
""")


def test_processes_agree_and_end_together(tmp_path):
    (tmp_path / "talk.py").write_text(TALK)
    (out, errors), (other, others) = finish(start(2, lambda *at: (tmp_path / "talk.py", *at)), code=1, timeout=200)
    assert "reading failed in process 1" in out
    assert "no such disk" in other
    for text in (errors, others):
        assert "error: process 1: config.rollout.prompts is 7; it must be even" in text
    assert "Traceback" not in others


# Sums over processes are added in another order than within one.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
RUN = ("mesh__data=2", "mesh__fsdp=2", "training__rollouts=5", "--devices=4")


def run(count, folder, *arguments):
    def command(port, index):
        several = [f"--processes={port},{count},{index}"] if count > 1 else []
        return "-m", "tests.tiny_runs", folder, *RUN, *several, *arguments

    return finish(start(count, command))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The directory of the run in one process with four devices."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(1, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_stop_resume_and_are_one_run(tmp_path, alone, count):
    folder = tmp_path / "run"
    (out, _), *others = run(count, folder, "--interrupt")  # of the last process alone
    assert "SIGTERM: saved after rollout" in out
    stopped = tiny.rows(folder)
    assert len(stopped) < 6
    (out, _), *others = run(count, folder, "--resume")
    assert "held-out accuracy after RL" in out
    ours, theirs = tiny.rows(folder), tiny.rows(alone)
    assert ours[: len(stopped)] == stopped
    assert [row["rollout"] for row in ours] == list(range(6))
    for row, wanted in zip(ours, theirs, strict=True):
        assert row.keys() == wanted.keys()
        for name, value in wanted.items():
            if value is None:
                assert row[name] is None
            else:
                np.testing.assert_allclose(row[name], value, **CLOSE, err_msg=f"{name} in {row['rollout']}")
        # What was sampled is the same to the token.
        for name in ("reward/mean", "response/length_mean"):
            assert row.get(name) == wanted.get(name)
    arrays, wanted = (tiny.arrays(path, 5) for path in (folder, alone))
    assert arrays.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(arrays[name], value, **CLOSE, err_msg=name)
    for file in ("samples/before.jsonl", "samples/after.jsonl"):
        assert (folder / file).read_text() == (alone / file).read_text()
    assert len(list((folder / "tensorboard").iterdir())) == 1


@pytest.mark.slow
def test_a_process_that_is_killed_takes_the_others_with_it(tmp_path):
    def command(port, index):
        return "-m", "tests.tiny_runs", tmp_path / "run", *RUN, f"--processes={port},2,{index}"

    processes = start(2, command)
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists() or not tiny.rows(tmp_path / "run"):
            assert processes[0].poll() is None
            time.sleep(0.2)
        processes[1].send_signal(signal.SIGKILL)
        assert processes[0].wait(timeout=200) != 0
    finally:
        for process in processes:
            process.kill()


KEEP = textwrap.dedent("""
    import pathlib, sys
    import jax
    port, index, folder = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P, NamedSharding
    from jaxrl_llm.parallel import sharding
    from jaxrl_llm.records.checkpoints import Checkpoints
    from jaxrl_llm.config import Mesh
    from jaxrl_llm.records.metrics import MetricsWriter, read_rows
    from jaxrl_llm.records.run_dir import open_run_dir

    config = {"run_dir": folder, "seed": 0}
    run = open_run_dir(folder, config, resume=False, overwrite=False)
    mesh = sharding.create_mesh(Mesh(data=1, fsdp=-1))
    assert mesh.shape["fsdp"] == 4 and jax.local_device_count() == 2
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    place = NamedSharding(mesh, P("fsdp"))
    state = {"x": sharding.put(x, place), "n": sharding.put(np.int32(3), sharding.replicated(mesh))}
    step = jax.jit(lambda s: {"x": s["x"] + 1, "n": s["n"]}, donate_argnums=0)
    with MetricsWriter(run.metrics, run.tensorboard) as metrics, Checkpoints(run.checkpoints, keep=2) as checkpoints:
        for rollout in (1, 2, 3):
            state = step(state)
            checkpoints.save(rollout, state, {"position": rollout}, 0.5)
            metrics.write(rollout, {"x": rollout})
    other = NamedSharding(mesh, P(None, "fsdp"))
    like = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=other), "n": state["n"]}
    with Checkpoints(run.checkpoints) as checkpoints:
        rollout, restored, record = checkpoints.restore(like)
    assert rollout == 3 and record == {"position": 3}
    for shard in restored["x"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), (x + 3)[shard.index])
    assert len(read_rows(run.metrics)) == 3
    try:
        open_run_dir(folder, config, resume=False, overwrite=False)
    except ValueError as error:
        print("refused:", error)
""")


@pytest.mark.slow
def test_one_process_writes_and_all_read(tmp_path):
    (tmp_path / "keep.py").write_text(KEEP)
    answers = finish(start(2, lambda port, index: (tmp_path / "keep.py", port, index, tmp_path / "run")))
    assert "already holds a run" in answers[0][0]
    assert "was refused by process 0" in answers[1][0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"rollout": i, "x": i} for i in (1, 2, 3)]
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
