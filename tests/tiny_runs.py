"""A whole run in miniature, for this process or for others:

    python -m tests.tiny_runs DIR [FIELD=VALUE ...] [--resume] [--interrupt] [--devices=N] [--processes=PORT,NUMBER,INDEX]

`--interrupt` sends SIGTERM to the last process when the loop begins.
"""

import ast
import functools
import io
import json
import operator
import os
import signal
import sys
import threading
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console

from jaxrl_llm.config import RunConfig, default_config
from jaxrl_llm.parallel import distributed, sharding
from jaxrl_llm.tasks import arithmetic
from jaxrl_llm.training import loop


def config(path, **fields):
    """Four rollouts with everything on that a resumed run must remember; `fields` such as `training__rollouts=1`."""
    c = default_config()
    c.run_dir = str(path)
    c.task.arithmetic.kinds = ("sum3",)
    c.task.arithmetic.eval_size = 8
    c.model.architecture = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "head_dim": 8,
    }
    c.warm_start.update({"steps": 3, "batch_size": 8})
    c.rollout.update({"prompts": 8, "group_size": 2, "max_response_length": 8, "capture_top_k": 3})
    c.rollout.update({"staleness": 1, "refill_rounds": 1})
    c.objective.name = "pdm"
    c.objective.penalty.kl = 0.1
    c.kl.target = 0.01
    c.training.update({"rollouts": 4, "updates_per_rollout": 2})
    c.evaluation.every = 2
    c.checkpoint.update({"every": 1, "keep": 10})
    c.optimizer.learning_rate = 1e-3
    for name, value in fields.items():
        *sections, field = name.split("__")
        functools.reduce(operator.getitem, sections, c)[field] = value
    return c


# What makes a run a plain one: neither lagging nor refilled nor compared with its beginning, and no warm start.
PLAIN = {
    "rollout__staleness": 0,
    "rollout__refill_rounds": 0,
    "objective__penalty__kl": 0.0,
    "kl__target": 0.0,
    "warm_start__steps": 0,
    "training__rollouts": 1,
}


def score(self, examples, completions, lengths, truncated):
    """An untrained policy earns nothing, and then nothing is learned either: reward the parity of the length instead."""
    return [float(len(c) % 2) for c in completions]


def run(c, console=Console, devices=1, **options):
    """`loop.train` on the first `devices` with that reward; returns its result and what it said."""
    text = io.StringIO()
    few = functools.partial(sharding.create_mesh, devices=jax.devices()[:devices])
    with (
        mock.patch.object(arithmetic.ArithmeticTask, "score", score),
        mock.patch.object(sharding, "create_mesh", few),
    ):
        result = loop.train(RunConfig.read(c), console=console(file=text, width=200), **options)
    return result, text.getvalue()


def interrupt():
    """A console that sends SIGTERM to the last process of the run, once, when the loop begins."""
    sent = []

    class Interrupt(Console):
        def print(self, *objects, **options):
            super().print(*objects, **options)
            last = jax.process_index() == jax.process_count() - 1
            if last and not sent and "before RL" in str(objects[0] if objects else ""):
                sent.append(True)
                threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

    return Interrupt


def rows(path):
    """The rows of the metrics file, every line of which must be one, without those that tell the time."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in lines]


def names(path):
    """The names of all metrics in the file."""
    return {name for line in (path / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}


def arrays(path, rollout):
    """A checkpoint's arrays by name, read without the package."""
    folder, reader = path / "checkpoints" / str(rollout) / "state", ocp.PyTreeCheckpointer()
    # As NumPy: the devices that wrote them may have been others.
    whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(folder).item_metadata.tree)
    return reader.restore(folder, restore_args=whole)


def same_arrays(one, other):
    leaves, structure = jax.tree.flatten(one)
    others, same = jax.tree.flatten(other)
    assert structure == same
    for a, b in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(a, b)


def main(folder, *rest):
    options = dict(word.removeprefix("--").partition("=")[::2] for word in rest if word.startswith("--"))
    fields = dict(word.split("=") for word in rest if not word.startswith("--"))
    port, number, index = options.get("processes", ",,").split(",")
    several = (f"localhost:{port}", int(number), int(index)) if port else ()
    with distributed.session(*several):
        changed = config(folder, **{name: ast.literal_eval(value) for name, value in fields.items()})
        console = interrupt() if "interrupt" in options else Console
        print(run(changed, console, int(options.get("devices", 1)), resume="resume" in options)[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
