"""Reward models: a decoder with a scalar head, trained on comparisons (Bradley-Terry), then frozen to judge a policy.

`train` leaves a run directory with config.json, metrics.jsonl and a checkpoint. `load` makes a `Scorer` of that, or of a
`*ForSequenceClassification` checkpoint of Hugging Face, and `attach` makes it a task's judge. The score of a dialogue is the
scalar at its last token.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from jaxrl_llm import config as configs
from jaxrl_llm import objectives, processes, schema, tasks
from jaxrl_llm.axes import round_up
from jaxrl_llm.experience import policy as policies
from jaxrl_llm.experience.data_order import example_indices
from jaxrl_llm.experience.estimators import wilson_interval
from jaxrl_llm.hub import pretrained
from jaxrl_llm.learning import optimizer as optimizers
from jaxrl_llm.models.abstract import abstract
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.parallel import sharding
from jaxrl_llm.records import progress
from jaxrl_llm.records.checkpoints import Checkpoints
from jaxrl_llm.records.metrics import MetricsWriter
from jaxrl_llm.records.run_dir import RunDir, open_run_dir
from jaxrl_llm.reward_models.scoring import Scorer, encode, pad, scores
from jaxrl_llm.tasks import Example


@dataclasses.dataclass(frozen=True)
class RewardModelConfig:
    """Training of a reward model.

    Attributes:
      run_dir: where it is written.
      seed: of parameters and data order.
      model: see `config.Model`; with a source its decoder begins as that checkpoint's.
      task: as in `RunConfig`: a task whose examples carry `chosen` and `rejected` replies in their metadata.
      max_length: longest dialogue in tokens, end token included; longer pairs are left out and counted.
      steps: optimizer steps.
      batch_size: pairs per step.
      evaluation_pairs: held-out pairs for the accuracy; 0 for all.
    """

    run_dir: str = "runs/reward_model"
    seed: int = 0
    model: configs.Model = dataclasses.field(default_factory=configs.Model)
    task: Mapping = dataclasses.field(
        default_factory=lambda: tasks.default_config() | {"name": "procedural_preferences"}
    )
    max_length: int = 64
    steps: int = 400
    batch_size: int = 64
    evaluation_pairs: int = 0
    optimizer: configs.Optimizer = dataclasses.field(default_factory=lambda: configs.Optimizer(learning_rate=3e-3))
    mesh: configs.Mesh = dataclasses.field(default_factory=configs.Mesh)

    def __post_init__(self):
        for name in ("max_length", "steps", "batch_size"):
            schema.require(getattr(self, name) > 0, f"config.{name}", getattr(self, name), "positive")
        schema.require(self.evaluation_pairs >= 0, "config.evaluation_pairs", self.evaluation_pairs, "0 or more")


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How often the model prefers the reply that was preferred.

    Attributes:
      value: share of the pairs; ties count one half.
      low, high: 95 % interval (Wilson).
      pairs: how many.
      mean, std: of the scores of all their replies, by which `Scorer` standardises.
    """

    value: float
    low: float
    high: float
    pairs: int
    mean: float
    std: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a run directory holds.

    Attributes:
      scorer: the model, its scores as they come.
      accuracy: what was measured after training.
      config: architecture.
      source: the checkpoint that the training began with, or None.
      step: the optimizer step of these parameters.
    """

    scorer: Scorer
    accuracy: Accuracy
    config: ModelConfig
    source: pathlib.Path | None
    step: int


def train(
    run: RewardModelConfig, *, overwrite: bool = False, console: Console | None = None
) -> tuple[Accuracy, RunDir]:
    """Trains a reward model, measures it on held-out pairs and saves it.

    Raises:
      ValueError: a field that does not fit, or a task without comparisons, before anything is compiled.
    """
    console = console or Console(quiet=jax.process_index() != 0)
    task = tasks.create(run.task)
    mesh = sharding.create_mesh(run.mesh)
    shards = sharding.data_shards(mesh)
    schema.require(run.batch_size % shards == 0, "config.batch_size", run.batch_size, f"a multiple of {shards} devices")
    model, tokenizer, source = policies.describe_model(run.model, task)
    policies.check_vocabulary(model, tokenizer, source)
    run_dir = open_run_dir(run.run_dir, schema.defaults(run), resume=False, overwrite=overwrite)
    held_out = next(iter(task.evaluation.values()))
    held_out = held_out[: run.evaluation_pairs or len(held_out)]
    optimizer = optimizers.create(run.optimizer, run.steps)
    graphdef, params = create(model, run.seed, mesh, source)
    opt_state = optimizers.init_on(mesh, optimizer, params)
    places = jax.tree.map(lambda x: x.sharding, (params, opt_state))
    step = functools.partial(update, graphdef, optimizer)
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*places, None))
    rows, dropped = sharding.batch_sharding(mesh), 0

    with (
        jax.set_mesh(mesh),
        MetricsWriter(run_dir.metrics, run_dir.tensorboard) as metrics,
        Checkpoints(run_dir.checkpoints, report=console.print) as checkpoints,
    ):
        with progress.bar(console, "reward model", run.steps) as bar:
            for i in range(run.steps):
                indices = example_indices(run.seed, i * run.batch_size, run.batch_size, len(task.train))
                kept, pairs = comparisons([task.train[j] for j in indices], tokenizer, run.max_length)
                dropped += run.batch_size - len(kept)
                # One width for the whole run, so that the step compiles once; rows without a pair count for nothing.
                chosen, rejected = (pad(side, run.batch_size, run.max_length) for side in pairs)
                counted = np.arange(run.batch_size) < len(kept)
                batch = sharding.put((chosen, rejected, counted), rows)
                params, opt_state, values = step(params, opt_state, *batch)
                if (i + 1) % 20 == 0 or i + 1 == run.steps:
                    row = {name: float(value) for name, value in processes.fetch(values).items()}
                    metrics.write(i + 1, row | {"pairs/dropped": dropped})
                    bar.update(i + 1, {"loss": row["loss"], "accuracy": row["accuracy"]})
        scorer = Scorer(
            graphdef, params, tokenizer, run.max_length, rows=round_up(run.batch_size, sharding.data_shards(mesh))
        )
        accuracy = evaluate(scorer, held_out)
        metrics.write(run.steps + 1, {f"eval/{k}": v for k, v in dataclasses.asdict(accuracy).items()})
        checkpoints.save(run.steps, params, {"accuracy": dataclasses.asdict(accuracy)}, accuracy.value)
    rows = {"held-out accuracy": f"{accuracy} on {accuracy.pairs} pairs"}
    if hasattr(task, "best_accuracy"):
        rows["the rule's own accuracy"] = f"{100 * task.best_accuracy(held_out):.1f} %"
    rows |= {"training pairs left out": str(dropped), "run directory": str(run_dir.path)}
    progress.summary(console, f"reward model on {task.name}, seed {run.seed}", rows)
    return accuracy, run_dir


def attach(task: tasks.Task, config: configs.RewardModel, mesh: jax.sharding.Mesh) -> tasks.Task:
    """`task` judged by the configured reward model; the task itself where none is configured.

    Raises:
      ValueError: there is no such model, the task takes no judge, or it needs one and has none.
    """
    if not config.source:
        if getattr(task, "judge", task) is None and task.name == "preferences":
            raise ValueError(
                f"task {task.name!r} has no rewards of its own: set config.reward_model.source to a reward model, or"
                " config.task.preferences.judge to a function"
            )
        return task
    if not hasattr(task, "with_judge"):
        raise ValueError(f"config.reward_model.source is set, but task {task.name!r} has its own rewards")
    return task.with_judge(load(config, mesh, next(iter(task.evaluation.values()))).judge)


def load(config: configs.RewardModel, mesh: jax.sharding.Mesh, held_out: Sequence[Example] = ()) -> Scorer:
    """The configured reward model, its parameters divided like a policy's.

    Args:
      config: names a run directory of `train`, or a Hugging Face checkpoint.
      mesh: where the parameters are placed.
      held_out: comparisons whose replies a checkpoint's scores are standardised on.

    Raises:
      ValueError: there is no reward model, it does not fit, or there is nothing to standardise on; names the field.
    """
    rows = round_up(config.batch_size, sharding.data_shards(mesh))
    if (pathlib.Path(config.source) / "checkpoints").is_dir():
        saved = read_run(RunDir(pathlib.Path(config.source)), mesh)
        scorer, measured = saved.scorer, saved.accuracy
    else:
        scorer = _from_checkpoint(config, mesh)
        if config.standardize:
            pairs = held_out[: config.held_out_pairs]
            schema.require(
                any("rejected" in example.metadata for example in pairs),
                "config.reward_model.standardize",
                True,
                "False: the task has no held-out pairs of replies to measure the scores' mean and deviation on",
            )
            measured = evaluate(dataclasses.replace(scorer, rows=rows), pairs)
    if config.standardize:
        scorer = dataclasses.replace(scorer, shift=measured.mean, scale=max(measured.std, 1e-6))
    return dataclasses.replace(scorer, clip=config.clip, rows=rows)


def is_run(config: Mapping[str, Any]) -> bool:
    """Whether this is the configuration of a run of `train`, and not of a policy's training."""
    return "evaluation_pairs" in config


def read_run(run_dir: RunDir, mesh: jax.sharding.Mesh | None = None) -> Saved:
    """What `train` left; reads no tensor of the checkpoint that it began with.

    Args:
      run_dir: of the training.
      mesh: where the parameters are placed; by default the training's.

    Raises:
      ValueError: it is not a reward model's, or cannot be read; names it.
    """
    config = run_dir.read_config()
    if not is_run(config):
        raise ValueError(f"{run_dir.path} is the run of a policy, not of a reward model")
    run = schema.read(RewardModelConfig, config, "config")
    model, tokenizer, source = policies.describe_model(run.model, tasks.create(run.task))
    graphdef, shapes = abstract(ScalarModel, model)
    mesh = mesh or sharding.reading_mesh(run.mesh)
    with Checkpoints(run_dir.checkpoints, read_only=True) as checkpoints:
        restored = checkpoints.restore(sharding.describe(shapes, mesh))
    scorer = Scorer(graphdef, restored.state, tokenizer, run.max_length)
    return Saved(scorer, Accuracy(**restored.record["accuracy"]), model, source, restored.rollout)


def _from_checkpoint(config: configs.RewardModel, mesh: jax.sharding.Mesh) -> Scorer:
    """A `*ForSequenceClassification` checkpoint."""
    try:
        source = pretrained.find(config.source)
    except ValueError as error:
        raise ValueError(
            f"config.reward_model.source {config.source!r} is no reward model: it is no run directory of"
            f" experiments/train_reward_model.py, and {error}"
        ) from error
    model = pretrained.read_config(source, dtype=config.dtype, param_dtype=config.dtype)
    tokenizer = pretrained.tokenizer(source)
    policies.check_vocabulary(model, tokenizer, source)
    params = pretrained.load_scalar(source, model, functools.partial(sharding.shardings, mesh=mesh))
    pad_id = pretrained.transformers_config(source).pad_token_id
    return Scorer(abstract(ScalarModel, model)[0], params, tokenizer, config.max_length, pad_id=pad_id)


def create(
    config: ModelConfig, seed: int, mesh: jax.sharding.Mesh, source: pathlib.Path | None = None
) -> tuple[nnx.GraphDef, Any]:
    """Graph and parameters of a `ScalarModel`, sharded as they are made: random ones, or a checkpoint's with a new head."""
    graphdef = abstract(ScalarModel, config)[0]
    if source is not None:
        places = functools.partial(sharding.shardings, mesh=mesh)
        return graphdef, pretrained.load_scalar(source, config, places, new_head=True)

    def init():
        return nnx.split(ScalarModel(config, rngs=nnx.Rngs(seed)), nnx.Param)[1]

    return graphdef, sharding.create(init, mesh)


def update(graphdef, optimizer: optax.GradientTransformation, params, opt_state, chosen, rejected, counted):
    """One Bradley-Terry step.

    Args:
      graphdef, optimizer: static.
      params, opt_state: of the model.
      chosen, rejected: (tokens int32 [B, L], mask bool [B, L]) of the dialogues.
      counted: bool [B], rows that hold a pair.

    Returns:
      params, opt_state, and loss, accuracy and mean margin of the batch.
    """
    tokens, mask = (jnp.concatenate(side) for side in zip(chosen, rejected, strict=True))

    def loss(params):
        first, second = jnp.split(scores(graphdef, params, tokens, mask), 2)
        losses = jnp.where(counted, objectives.bradley_terry(first, second), 0.0)
        return objectives.divide(jnp.sum(losses), jnp.sum(counted)), first - second

    (value, margin), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = optimizer.update(gradient, opt_state, params)

    def mean(x):
        return objectives.divide(jnp.sum(jnp.where(counted, x, 0.0)), jnp.sum(counted))

    values = {"loss": value, "accuracy": mean(margin > 0), "margin": mean(margin)}
    return optax.apply_updates(params, updates), opt_state, values


def evaluate(scorer: Scorer, examples: Sequence[Example]) -> Accuracy:
    """Accuracy on the comparisons of `examples`, those too long left out."""
    kept, pairs = comparisons(examples, scorer.tokenizer, scorer.max_length)
    schema.require(len(kept) > 0, "held-out pairs", 0, "at least 1 that fits config.max_length")
    chosen, rejected = map(scorer.raw, pairs)
    right = float(np.sum(chosen > rejected) + 0.5 * np.sum(chosen == rejected))
    both = np.concatenate([chosen, rejected])
    low, high = wilson_interval(right, len(kept))
    return Accuracy(right / len(kept), low, high, len(kept), float(both.mean()), float(both.std()))


def comparisons(
    examples: Sequence[Example], tokenizer: Any, max_length: int
) -> tuple[list[Example], tuple[list[list[int]], list[list[int]]]]:
    """Token ids of the chosen and of the rejected dialogues of the examples whose both sides fit.

    Raises:
      ValueError: an example without a chosen and a rejected reply; names it.
    """
    for example in examples:
        if not {"chosen", "rejected"} <= example.metadata.keys():
            raise ValueError(
                f"example {example.id!r} has no chosen and rejected reply; a reward model learns from pairs"
            )
    sides = [encode(examples, [e.metadata[side] for e in examples], tokenizer) for side in ("chosen", "rejected")]
    fits = [max(map(len, pair)) <= max_length for pair in zip(*sides, strict=True)]
    kept = [example for example, fit in zip(examples, fits, strict=True) if fit]
    return kept, tuple([ids for ids, fit in zip(side, fits, strict=True) if fit] for side in sides)
