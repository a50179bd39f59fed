"""A whole run, read top to bottom: set up, warm start, then rollout -> advantages -> updates, with evaluation between.

Everything random is a function of the seed and of how far the run has come, so that a resumed run repeats what an
uninterrupted one would have done.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jaxrl_llm import config as configs
from jaxrl_llm import schema, tasks
from jaxrl_llm.config import RunConfig
from jaxrl_llm.experience import collector as collectors
from jaxrl_llm.experience import policy as policies
from jaxrl_llm.experience.evaluation import Evaluation, Evaluator
from jaxrl_llm.experience.policy import Policy
from jaxrl_llm.experience.stream import ExperienceStream
from jaxrl_llm.learning import reference
from jaxrl_llm.learning import trainer as trainers
from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.learning.trainer import Trainer
from jaxrl_llm.parallel import sharding
from jaxrl_llm.records import plots, progress, samples
from jaxrl_llm.records.checkpoints import Checkpoints, Restored, config_difference
from jaxrl_llm.records.metrics import MetricsWriter
from jaxrl_llm.records.run_dir import RunDir, open_run_dir
from jaxrl_llm.reward_models import reward_model
from jaxrl_llm.training import warm_start
from jaxrl_llm.training.callbacks import Callback, asked_to_stop
from jaxrl_llm.training.early_stop import collapsed
from jaxrl_llm.training.signals import StopSignals

# Independent streams of randomness, folded into the run's key.
SAMPLING, SHUFFLING, EVALUATION = range(3)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished run reports.

    Attributes:
      before, after: evaluation of the first held-out set before and after RL.
      run_dir: where everything lies.
      seconds: wall time of the whole call.
    """

    before: Evaluation
    after: Evaluation
    run_dir: RunDir
    seconds: float


def train(
    run: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result | None:
    """Runs `run` to its end, or until SIGTERM, Ctrl-C or a collapse (`config.early_stop`): then it saves and returns None.

    Args:
      run: a checked configuration (`RunConfig.read`).
      resume: go on from the run directory's last checkpoint.
      overwrite: replace a run that is there.
      console: where progress goes; the terminal by default.
      callbacks: see every row of the metrics; one that returns True ends the run as SIGTERM does.

    Raises:
      ValueError: a configuration that does not fit its task, model or devices, before anything is compiled.
    """
    start = time.monotonic()
    # One process speaks for all.
    console = console or Console(quiet=jax.process_index() != 0)

    # ---- Everything that can be refused is refused here ------------------------------------------------------------
    task = tasks.create(run.task)
    warm_start.check(run, task)
    mesh = sharding.create_mesh(run.mesh)
    configs.check_devices(run, sharding.data_shards(mesh))
    # A resumed run has parameters of its own.
    policy = policies.describe(run, task) if resume else policies.create(run, task, mesh)
    rewarded = reward_model.attach(task, run.reward_model, mesh)
    config = schema.defaults(run)
    run_dir = open_run_dir(run.run_dir, config, resume=resume, overwrite=overwrite)
    if resume:
        _check_same_config(run, run_dir.read_config(), config)
        run_dir.write_config(config)

    # ---- The parts -------------------------------------------------------------------------------------------------
    trainer = trainers.create(run, policy.config, policy.graphdef, mesh)
    evaluator = Evaluator(run, rewarded, policy)
    key = jax.random.key(run.seed)
    collector = collectors.create(run, rewarded, policy, jax.random.fold_in(key, SAMPLING))

    with (
        jax.set_mesh(mesh),
        Checkpoints(run_dir.checkpoints, run.checkpoint.keep, report=console.print) as checkpoints,
        StopSignals() as stop,
    ):
        # ---- State: resumed, or warm-started -----------------------------------------------------------------------
        begun = _resumed(run, trainer, policy, mesh, checkpoints, console) if resume else None
        if begun is None:
            policy = policies.create(run, task, mesh) if resume else policy
            begun = _begun(run, task, trainer, policy, mesh, console, stop)
        if begun is None:
            return None
        first, state, record = begun
        del begun  # or its copies for a lagging sampler would outlive their use
        fresh = "before" not in record
        record["config"] = config
        source = ExperienceStream(collector, first, record["position"], state.behavior_params, overlap=mesh.size == 1)
        state = state.replace(behavior_params=())
        learner = Learner(run, task, trainer, state, mesh, jax.random.fold_in(key, SHUFFLING))

        with MetricsWriter(run_dir.metrics, run_dir.tensorboard, None if fresh else first) as metrics, source:
            if fresh:
                before = evaluator(state.params, jax.random.fold_in(key, EVALUATION))
                metrics.write(0, before.metrics(evaluator.name))
                asked_to_stop(callbacks, 0, before.metrics(evaluator.name))  # too early to stop: it only looks
                path = samples.write(run_dir.samples, "before", "Before RL", before.scored)
                record["before"] = before.numbers()
                console.print(f"before RL: accuracy {before} on {len(evaluator.prompts)} held-out prompts ({path})")
                record["best"] = before.accuracy
                checkpoints.save(0, state.replace(behavior_params=source.lagging), record, before.accuracy)
            after = None

            # ---- The loop ------------------------------------------------------------------------------------------
            with progress.bar(console, "RL", run.training.rollouts, first) as bar:
                accuracy = record["before"]["accuracy"]
                for rollout in range(first + 1, run.training.rollouts + 1):
                    clock = time.monotonic()
                    experience = source.next(state.params)
                    record["position"] = experience.position
                    sampled = time.monotonic()
                    state, learned = learner(state, experience, rollout, record["kl_scale"])
                    if trainer.compared:
                        kl = learned["kl/reference"]
                        record["kl_scale"] = reference.steer(record["kl_scale"], kl, run.kl.target, run.kl.rate)
                    tokens = int(np.sum(experience.scored.rollout.response_mask))
                    row = experience.metrics() | learned | {"time/rollout_s": sampled - clock}
                    row["time/tokens_per_s"] = tokens / (time.monotonic() - clock)

                    last = rollout == run.training.rollouts
                    record["beyond"], collapse = collapsed(run.early_stop, record["beyond"], row)
                    due = run.evaluation.every and rollout % run.evaluation.every == 0
                    evaluated, improved = None, False
                    if last or due:
                        evaluation_key = jax.random.fold_in(jax.random.fold_in(key, EVALUATION), rollout)
                        after = evaluated = evaluator(state.params, evaluation_key)
                        accuracy, improved = evaluated.accuracy, evaluated.accuracy > record["best"]
                        record["best"] = max(accuracy, record["best"])
                        row |= evaluated.metrics(evaluator.name)
                        samples.write(
                            run_dir.samples, f"rollout-{rollout:05d}", f"After rollout {rollout}", evaluated.scored
                        )
                    metrics.write(rollout, row)
                    stopped, asked = stop.agreed(), asked_to_stop(callbacks, rollout, row)
                    ending = last or stopped or asked or bool(collapse)
                    if ending or improved or rollout % run.checkpoint.every == 0:
                        whole = state.replace(behavior_params=source.lagging)
                        checkpoints.save(rollout, whole, record, evaluated.accuracy if evaluated else None)
                    live = {"reward": row["reward/mean"], "accuracy": accuracy, "tok/s": row["time/tokens_per_s"]}
                    bar.update(rollout, live)
                    if ending and not last:
                        checkpoints.wait()
                        why = f"{stop.name}:" if stopped else "a callback:" if asked else f"stopped early, {collapse}:"
                        console.print(f"{why} saved after rollout {rollout}; go on with --resume")
                        return None
        checkpoints.wait()
        if after is None:  # resumed after its end
            after = evaluator(state.params, jax.random.fold_in(jax.random.fold_in(key, EVALUATION), first))

    return _finished(run, task, run_dir, Evaluation(**record["before"], scored=after.scored), after, start, console)


def _resumed(
    run: RunConfig, trainer: Trainer, policy: Policy, mesh: Mesh, checkpoints: Checkpoints, console: Console
) -> Restored | None:
    """What the run directory's last checkpoint holds, or None where there is none yet."""
    # Shapes and places only: there is no room for a second state beside the one that is read.
    like = trainer.describe(policy.params, mesh)
    restored = checkpoints.restore(like.replace(behavior_params=(like.params,) * run.rollout.staleness))
    if restored is None:
        console.print("the run directory holds no checkpoint yet: starting from the beginning")
    else:
        console.print(f"resuming after rollout {restored.rollout} of {run.training.rollouts}")
    return restored


def _begun(
    run: RunConfig,
    task: tasks.Task,
    trainer: Trainer,
    policy: Policy,
    mesh: Mesh,
    console: Console,
    stop: StopSignals,
) -> Restored | None:
    """The state before the first rollout, after the warm start, or None where it was stopped."""
    params = warm_start.learn(run, task, policy, mesh, console, stop)
    if stop.agreed():
        console.print(f"{stop.name}: stopped before RL began; there is nothing to save yet")
        return None
    copies = (jax.tree.map(jnp.copy, params),) * run.rollout.staleness
    state = trainer.init(params, mesh).replace(behavior_params=copies)
    return Restored(0, state, {"position": 0, "beyond": {}, "kl_scale": 1.0})


def _finished(
    run: RunConfig,
    task: tasks.Task,
    run_dir: RunDir,
    before: Evaluation,
    after: Evaluation,
    start: float,
    console: Console,
) -> Result:
    """Completions, pictures and the closing table."""
    after_path = samples.write(run_dir.samples, "after", "After RL", after.scored)
    picture = run_dir.plots / "training.png"
    if jax.process_index() == 0:
        plots.draw([run_dir.path], picture)
    seconds = time.monotonic() - start
    progress.summary(
        console,
        f"{run.objective['name']} on {task.name}, seed {run.seed}",
        {
            "held-out accuracy before RL": str(before),
            "held-out accuracy after RL": f"{after}   ({100 * (after.accuracy - before.accuracy):+.1f} points)",
            "time": f"{seconds:.0f} s",
            "metrics": str(run_dir.metrics),
            "TensorBoard": str(run_dir.tensorboard),
            "plots": str(picture),
            "completions": f"{run_dir.samples / 'before.md'}, {after_path.name}",
            "checkpoints": str(run_dir.checkpoints),
            "configuration": str(run_dir.config),
        },
    )
    return Result(before, after, run_dir, seconds)


def _check_same_config(run: RunConfig, saved: dict[str, Any], now: dict[str, Any]) -> None:
    difference = config_difference(saved, now)
    if difference and not run.checkpoint.allow_config_change:
        raise ValueError(
            "the configuration differs from the checkpoint's; set config.checkpoint.allow_config_change to go on:\n  "
            + "\n  ".join(difference)
        )
