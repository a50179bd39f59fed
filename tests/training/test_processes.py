"""Two processes of one run: one of them writes, both of them go on."""

import json
import socket
import subprocess
import sys
import textwrap

import pytest

PROCESS = textwrap.dedent("""
    import pathlib, sys
    import jax
    port, index, folder = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P, NamedSharding
    from jaxrl_llm.training import sharding
    from jaxrl_llm.training.checkpoint import Checkpoints
    from jaxrl_llm.training.config import Mesh
    from jaxrl_llm.training.metrics import MetricsWriter, read_rows
    from jaxrl_llm.training.run_dir import open_run_dir

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
def test_two_processes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", PROCESS, str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    processes = [subprocess.Popen([*command, str(i), str(tmp_path / "run")], **pipes) for i in range(2)]
    try:
        answers = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, answers, strict=True):
        assert process.returncode == 0, errors
    assert "already holds a run" in answers[0][0]
    assert "was refused by process 0" in answers[1][0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"rollout": i, "x": i} for i in (1, 2, 3)]
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
