"""A whole run, read top to bottom: set up, warm start, then rollout -> advantages -> updates, with evaluation between.

Everything random is a function of the seed and of how far the run has come, so that a resumed run repeats what an
uninterrupted one would have done.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxrl_llm import objectives, processes, schema, tasks
from jaxrl_llm.analysis import plots
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.sampler import Sampler, SamplingConfig
from jaxrl_llm.training import advantages, packing, progress, reference, reward_model, rollouts, samples, sharding
from jaxrl_llm.training import batch as batches
from jaxrl_llm.training import config as configs
from jaxrl_llm.training import optimizer as optimizers
from jaxrl_llm.training import policy as policies
from jaxrl_llm.training import trainer as trainers
from jaxrl_llm.training.checkpoint import Checkpoints, config_difference
from jaxrl_llm.training.collect import tokenize
from jaxrl_llm.training.config import RunConfig
from jaxrl_llm.training.data import example_indices
from jaxrl_llm.training.early_stop import collapsed
from jaxrl_llm.training.evaluate import Evaluation, evaluate
from jaxrl_llm.training.metrics import MetricsWriter, reduce_updates
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.run_dir import RunDir, open_run_dir
from jaxrl_llm.training.signals import StopSignals
from jaxrl_llm.training.step import Forward, TrainStep, score
from jaxrl_llm.types import Batch

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
    run: RunConfig, *, resume: bool = False, overwrite: bool = False, console: Console | None = None
) -> Result | None:
    """Runs `run` to its end, or until SIGTERM, Ctrl-C or a collapse (`config.early_stop`): then it saves and returns None.

    Args:
      run: a checked configuration (`RunConfig.read`).
      resume: go on from the run directory's last checkpoint.
      overwrite: replace a run that is there.
      console: where progress goes; the terminal by default.

    Raises:
      ValueError: a configuration that does not fit its task, model or devices, before anything is compiled.
    """
    start = time.monotonic()
    # One process speaks for all.
    console = console or Console(quiet=jax.process_index() != 0)

    # ---- Everything that can be refused is refused here ------------------------------------------------------------
    task = tasks.create(run.task)
    _check_warm_start(run, task)
    mesh = sharding.create_mesh(run.mesh)
    configs.check_devices(run, sharding.data_shards(mesh))
    policy = policies.create(run, task, mesh)
    rewarded = reward_model.attach(task, run.reward_model, mesh)
    config = schema.defaults(run)
    run_dir = open_run_dir(run.run_dir, config, resume=resume, overwrite=overwrite)
    if resume:
        _check_same_config(run, run_dir.read_config(), config)
        run_dir.write_config(config)

    # ---- The parts -------------------------------------------------------------------------------------------------
    trainer = trainers.create(run, policy.config, policy.graphdef, mesh)
    loss, critic, compared = trainer.loss, trainer.critic, trainer.compared
    parts = run.training.updates_per_rollout * run.training.micro_batches
    scorer = jax.jit(functools.partial(score, trainer.forward, micro_batches=parts))
    measure = jax.jit(objectives.margin_diagnostics, static_argnames="alpha")
    evaluator = _Evaluator(run, rewarded, policy)
    key = jax.random.key(run.seed)
    gather = rollouts.create(run, rewarded, policy, jax.random.fold_in(key, SAMPLING))

    with (
        jax.set_mesh(mesh),
        Checkpoints(run_dir.checkpoints, run.checkpoint.keep, report=console.print) as checkpoints,
        StopSignals() as stop,
    ):
        # ---- State: resumed, or warm-started -----------------------------------------------------------------------
        restored = None
        if resume:
            # Shapes and places only: there is no room for a second state beside the one that is read.
            like = jax.eval_shape(functools.partial(trainer.init, mesh=mesh), policy.params)
            like = like.replace(behavior_params=(like.params,) * run.rollout.staleness)
            restored = checkpoints.restore(sharding.placed(like, sharding.shardings(like, mesh)))
        if restored is not None:
            first, state, record = restored.rollout, restored.state, restored.record
            console.print(f"resuming after rollout {first} of {run.training.rollouts}")
        else:
            if resume:
                console.print("the run directory holds no checkpoint yet: starting from the beginning")
            first, record = 0, {"position": 0, "beyond": {}, "kl_scale": 1.0}
            params = _warm_start(run, task, policy, mesh, console, stop)
            if stop.agreed():
                console.print(f"{stop.name}: stopped before RL began; there is nothing to save yet")
                return None
            state = trainer.init(params, mesh)
            copies = (jax.tree.map(jnp.copy, params),) * run.rollout.staleness
            state = state.replace(behavior_params=copies)
        record["config"] = config
        source = Rollouts(gather, first, record["position"], state.behavior_params, overlap=mesh.size == 1)
        state = state.replace(behavior_params=())
        step = trainers.compile_step(trainer.step, state)

        with MetricsWriter(run_dir.metrics, run_dir.tensorboard, first if restored else None) as metrics, source:
            if restored is None:
                before = evaluator(state.params, jax.random.fold_in(key, EVALUATION))
                metrics.write(0, before.metrics(evaluator.name))
                path = samples.write(run_dir.samples, "before", "Before RL", before.collected)
                record["before"] = _numbers(before)
                console.print(f"before RL: accuracy {before} on {len(evaluator.prompts)} held-out prompts ({path})")
                record["best"] = before.accuracy
                checkpoints.save(0, state.replace(behavior_params=source.lagging), record, before.accuracy)
            after = None

            # ---- The loop ------------------------------------------------------------------------------------------
            with progress.bar(console, "RL", run.training.rollouts, first) as bar:
                accuracy = record["before"]["accuracy"]
                for rollout in range(first + 1, run.training.rollouts + 1):
                    clock = time.monotonic()
                    gathered = source.next(state.params)
                    record["position"] = gathered.position
                    sampled = time.monotonic()
                    batch = rollouts.to_batch(task, gathered)
                    lengths = packing.lengths_of(batch)
                    if run.training.packing:
                        shared = packing.plan(lengths, sharding.data_shards(mesh), parts, reorder=False)[1]
                        batch = batch.replace(packing=shared)
                    batch = _spread(batch, mesh)
                    if "old_logprobs" in loss.needs or run.kl.reward:
                        batch = batch.replace(old_logprobs=scorer(state.params, batch))
                    if compared:
                        batch = batch.replace(reference_logprobs=scorer(state.reference_params, batch))
                    batch, assessed = advantages.assess(run, state, gathered, batch, critic, record["kl_scale"])
                    batch = _spread(batch, mesh)

                    order = jax.random.fold_in(jax.random.fold_in(key, SHUFFLING), rollout)
                    updates, slots = [], 0
                    for minibatch in _minibatches(batch, lengths, order, run.training, mesh):
                        state, update = step(state, minibatch)
                        updates.append(update)
                        slots += packing.slots(minibatch)
                    jax.block_until_ready(state)  # steps are dispatched, not awaited
                    done = time.monotonic()

                    tokens = int(np.sum(gathered.collected.rollout.response_mask))
                    row = gathered.metrics() | assessed | reduce_updates(updates)
                    row |= _mismatch(batch, updates[0])
                    row["data/padding_share"] = 1 - run.training.epochs * lengths.tokens.sum() / slots
                    if run.diagnostics.margin:
                        now = scorer(state.params, batch)
                        where = batch.behavior_logprobs, batch.advantages, batch.response_mask
                        row |= reduce_updates([measure(now, *where, alpha=run.diagnostics.margin)])
                    if compared:
                        kl = reference.kl_per_token(
                            batch.behavior_logprobs, batch.reference_logprobs, batch.response_mask
                        )
                        row["kl/reference"], row["kl/scale"] = kl, record["kl_scale"]
                        record["kl_scale"] = reference.steer(record["kl_scale"], kl, run.kl.target, run.kl.rate)
                    row["optimizer/steps"] = rollout * len(updates)
                    row["optimizer/skipped_total"] = int(processes.fetch(state.skipped))
                    row["time/rollout_s"], row["time/update_s"] = sampled - clock, done - sampled
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
                            run_dir.samples, f"rollout-{rollout:05d}", f"After rollout {rollout}", evaluated.collected
                        )
                    metrics.write(rollout, row)
                    stopped = stop.agreed()
                    ending = last or stopped or bool(collapse)
                    if ending or improved or rollout % run.checkpoint.every == 0:
                        whole = state.replace(behavior_params=source.lagging)
                        checkpoints.save(rollout, whole, record, evaluated.accuracy if evaluated else None)
                    live = {"reward": row["reward/mean"], "accuracy": accuracy, "tok/s": row["time/tokens_per_s"]}
                    bar.update(rollout, live)
                    if ending and not last:
                        checkpoints.wait()
                        why = f"{stop.name}:" if stopped else f"stopped early, {collapse}:"
                        console.print(f"{why} saved after rollout {rollout}; go on with --resume")
                        return None

        # ---- What it came to ---------------------------------------------------------------------------------------
        checkpoints.wait()
    if after is None:  # resumed after its end
        after = evaluator(state.params, jax.random.fold_in(jax.random.fold_in(key, EVALUATION), first))
    after_path = samples.write(run_dir.samples, "after", "After RL", after.collected)
    picture = run_dir.plots / "training.png"
    if jax.process_index() == 0:
        plots.draw([run_dir.path], picture)
    seconds = time.monotonic() - start
    before = Evaluation(**record["before"], collected=after.collected)
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


class _Evaluator:
    """The held-out prompts and how they are sampled."""

    def __init__(self, run: RunConfig, task: tasks.Task, policy: Policy):
        self.name, examples = next(iter(task.evaluation.items()))
        chosen = examples[: run.evaluation.prompts or len(examples)]
        self.prompts = tokenize(chosen, policy.tokenizer, run.rollout.max_prompt_length)
        choice = Choice(temperature=run.evaluation.temperature, top_p=run.evaluation.top_p)
        config = SamplingConfig(run.rollout.max_response_length, policy.stop_ids, policy.pad_id, choice)
        self.sampler = Sampler(policy.graphdef, policy.config, config)
        self.task, self.tokenizer, self.samples = task, policy.tokenizer, run.evaluation.samples

    def __call__(self, params: Any, key: jax.Array) -> Evaluation:
        return evaluate(self.sampler, params, self.task, self.tokenizer, self.prompts, key, self.samples)


def _check_same_config(run: RunConfig, saved: dict[str, Any], now: dict[str, Any]) -> None:
    difference = config_difference(saved, now)
    if difference and not run.checkpoint.allow_config_change:
        raise ValueError(
            "the configuration differs from the checkpoint's; set config.checkpoint.allow_config_change to go on:\n  "
            + "\n  ".join(difference)
        )


def _warm_start(run: RunConfig, task: tasks.Task, policy: Policy, mesh, console: Console, stop: StopSignals) -> Any:
    """Parameters after supervised learning on the task's worked solutions, as far as it came before a stop."""
    warm = run.warm_start
    if warm.steps == 0:
        return policy.params
    config = configs.Optimizer(
        learning_rate=warm.learning_rate, schedule="cosine", warmup_steps=max(1, warm.steps // 20), b2=0.99
    )
    optimizer = optimizers.create(config, warm.steps)
    loss = objectives.build({"name": "reinforce"})
    state = trainers.initial_state(policy.params, optimizer, mesh)
    forward = Forward(policy.graphdef, policy.config.vocab_size, layout=sharding.token_layout(mesh))
    step = trainers.compile_step(TrainStep(forward, loss, optimizer), state)
    with progress.bar(console, "warm start", warm.steps) as bar:
        for i in range(warm.steps):
            if stop.agreed():
                break
            batch = _demonstrations(run, _demonstrated(run, task, i), policy)
            state, metrics = step(state, _spread(batch, mesh))
            if (i + 1) % 10 == 0 or i + 1 == warm.steps:
                bar.update(i + 1, {"loss": float(processes.fetch(metrics["loss"].numerator))})
    return state.params


def _demonstrated(run: RunConfig, task: tasks.Task, step: int) -> list[tasks.Example]:
    """The examples of one step of the warm start, from a stream of its own."""
    size = run.warm_start.batch_size
    return [task.train[j] for j in example_indices(run.seed + 1, step * size, size, len(task.train))]


def _check_warm_start(run: RunConfig, task: tasks.Task) -> None:
    # Looking at the first step's examples is enough for a task that has no solutions at all, and cheap for any task.
    steps, right = run.warm_start.steps, f"0: task {task.name!r} has examples without a worked solution"
    worked = steps == 0 or all(example.solution for example in _demonstrated(run, task, 0))
    schema.require(worked, "config.warm_start.steps", steps, right)


def _demonstrations(run: RunConfig, examples: list[tasks.Example], policy: Policy) -> Batch:
    prompts = tokenize(examples, policy.tokenizer, run.rollout.max_prompt_length)
    responses = [
        [*policy.tokenizer.encode(e.solution, add_special_tokens=False), policy.stop_ids[0]] for e in prompts.examples
    ]
    longest = max(map(len, responses))
    schema.require(
        longest <= run.rollout.max_response_length,
        "config.rollout.max_response_length",
        run.rollout.max_response_length,
        f"at least {longest}, the length of a worked solution with its end token",
    )
    width = -(-max(map(len, prompts.tokens)) // 4) * 4
    return batches.from_pairs(prompts.tokens, responses, width, run.rollout.max_response_length, policy.pad_id)


def _spread(batch: Batch, mesh) -> Batch:
    return sharding.put(batch, jax.tree.map(lambda _: sharding.batch_sharding(mesh), batch))


def _minibatches(batch: Batch, lengths: packing.Lengths, key: jax.Array, training: configs.Training, mesh):
    """The rollout's rows in a new random order every epoch, cut into mini-batches, packed where the configuration says so."""
    shards, parts = sharding.data_shards(mesh), training.micro_batches
    take = jax.jit(batches.take, out_shardings=sharding.batch_sharding(mesh))
    batch = batch.replace(packing=None)  # that was for scoring, and would have `take` compiled anew
    for epoch in range(training.epochs):
        order = np.asarray(jax.random.permutation(jax.random.fold_in(key, epoch), len(lengths.tokens)))
        for rows in order.reshape(training.updates_per_rollout, -1):
            if not training.packing:
                yield take(batch, rows)
                continue
            places, shared = packing.plan(lengths.take(rows), shards, parts)
            yield take(batch, rows[places], shared)


def _mismatch(batch: Batch, update: dict[str, objectives.Metric]) -> dict[str, float]:
    """Sampler against trainer before a rollout's updates; staleness counts as mismatch here.

    From the scores of the whole rollout, where the objective wants them, else from the first mini-batch.
    """
    if batch.old_logprobs is not None:
        old, behavior, mask = processes.fetch((batch.old_logprobs, batch.behavior_logprobs, batch.response_mask))
        log_ratio = np.clip(np.float64(old[mask]) - behavior[mask], -20, 20)  # bounded as the objectives bound it
        log_ratio = log_ratio[np.isfinite(log_ratio)]
        if not len(log_ratio):
            return {}
        distance, k3 = np.abs(log_ratio), np.expm1(log_ratio) - log_ratio
        values = {"mean_abs_log_ratio": distance.mean(), "max_abs_log_ratio": distance.max(), "k3": k3.mean()}
        return {f"mismatch/{name}": float(value) for name, value in values.items()}
    names = {"ratio/abs_log": "mean_abs_log_ratio", "ratio/max_abs_log": "max_abs_log_ratio", "ratio/k3": "k3"}
    values = reduce_updates([{name: update[name] for name in names}])
    return {f"mismatch/{short}": values[name] for name, short in names.items() if name in values}


def _numbers(evaluation: Evaluation) -> dict[str, float]:
    return {f.name: getattr(evaluation, f.name) for f in dataclasses.fields(evaluation) if f.name != "collected"}
