"""Reward models: a decoder with a scalar head, trained on comparisons (Bradley-Terry), then frozen to judge a policy.

`train` leaves a run directory with config.json, metrics.jsonl and a checkpoint; `load` reads it back as a `Scorer`, and
`Scorer.judge` is what a task's `with_judge` takes. The score of a dialogue is the scalar at its end token.
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

from jaxrl_llm import objectives, schema, tasks
from jaxrl_llm.analysis.estimators import wilson_interval
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import ScalarModel, last_valid
from jaxrl_llm.tasks import Example
from jaxrl_llm.training import config as configs
from jaxrl_llm.training import optimizer as optimizers
from jaxrl_llm.training import progress, sharding
from jaxrl_llm.training.checkpoint import Checkpoints
from jaxrl_llm.training.collect import tokenize
from jaxrl_llm.training.data import example_indices
from jaxrl_llm.training.metrics import MetricsWriter
from jaxrl_llm.training.run_dir import RunDir, open_run_dir

BUCKET = 8  # the shortest width that rows are padded to; the others are its doubles


@dataclasses.dataclass(frozen=True)
class RewardModelConfig:
    """Training of a reward model.

    Attributes:
      run_dir: where it is written.
      seed: of parameters and data order.
      model: its architecture; see `config.Model`.
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
class Scorer:
    """A frozen reward model.

    Attributes:
      graphdef, params: of the `ScalarModel`.
      tokenizer: its own; dialogues reach it as text.
      max_length: of longer dialogues the last tokens are scored.
      shift, scale: a score is (raw - shift) / scale.
      clip: bound on the absolute score after that; 0 for none.
      rows: dialogues per forward pass.
    """

    graphdef: nnx.GraphDef
    params: Any
    tokenizer: Any
    max_length: int
    shift: float = 0.0
    scale: float = 1.0
    clip: float = 0.0
    rows: int = 32

    def judge(self, examples: Sequence[Example], replies: Sequence[str]) -> list[float | None]:
        """A score for each reply, as `Task.score`."""
        dialogues = encode(examples, replies, self.tokenizer)
        scores = (self.raw([ids[-self.max_length :] for ids in dialogues]) - self.shift) / self.scale
        return (np.clip(scores, -self.clip, self.clip) if self.clip else scores).tolist()

    def raw(self, dialogues: Sequence[Sequence[int]]) -> np.ndarray:
        """float64 [N] scores of token ids, computed in batches of similar length."""
        scores = np.zeros(len(dialogues))
        for members, width in length_buckets([len(ids) for ids in dialogues], self.rows):
            tokens, mask = pad([dialogues[i] for i in members], self.rows, width)
            scores[members] = np.asarray(_scores(self.graphdef, self.params, tokens, mask))[: len(members)]
        return scores


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
    model = _model_config(run, task)
    run_dir = open_run_dir(run.run_dir, schema.defaults(run), resume=False, overwrite=overwrite)
    held_out = next(iter(task.evaluation.values()))
    held_out = held_out[: run.evaluation_pairs or len(held_out)]
    optimizer = optimizers.create(run.optimizer, run.steps)
    graphdef, params = create(model, run.seed, mesh)
    opt_state = jax.jit(functools.partial(optimizers.init, optimizer))(params)
    step = jax.jit(functools.partial(update, graphdef, optimizer), donate_argnums=(0, 1))
    rows, dropped = sharding.batch_sharding(mesh), 0

    with (
        MetricsWriter(run_dir.metrics, run_dir.tensorboard) as metrics,
        Checkpoints(run_dir.checkpoints, report=console.print) as checkpoints,
    ):
        with progress.bar(console, "reward model", run.steps) as bar:
            for i in range(run.steps):
                indices = example_indices(run.seed, i * run.batch_size, run.batch_size, len(task.train))
                kept, pairs = comparisons([task.train[j] for j in indices], task.tokenizer, run.max_length)
                dropped += run.batch_size - len(kept)
                # One width for the whole run, so that the step compiles once; rows without a pair count for nothing.
                chosen, rejected = (pad(side, run.batch_size, run.max_length) for side in pairs)
                counted = np.arange(run.batch_size) < len(kept)
                batch = sharding.put((chosen, rejected, counted), rows)
                params, opt_state, values = step(params, opt_state, *batch)
                if (i + 1) % 20 == 0 or i + 1 == run.steps:
                    row = {name: float(value) for name, value in values.items()}
                    metrics.write(i + 1, row | {"pairs/dropped": dropped})
                    bar.update(i + 1, {"loss": row["loss"], "accuracy": row["accuracy"]})
        scorer = Scorer(graphdef, params, task.tokenizer, run.max_length, rows=_rows(run.batch_size, shards))
        accuracy = evaluate(scorer, held_out)
        metrics.write(run.steps + 1, {f"eval/{k}": v for k, v in dataclasses.asdict(accuracy).items()})
        checkpoints.save(run.steps, params, {"accuracy": dataclasses.asdict(accuracy)}, accuracy.value)
    rows = {"held-out accuracy": f"{accuracy} on {accuracy.pairs} pairs"}
    if hasattr(task, "best_accuracy"):
        rows["the rule's own accuracy"] = f"{100 * task.best_accuracy(held_out):.1f} %"
    rows |= {"training pairs left out": str(dropped), "run directory": str(run_dir.path)}
    progress.summary(console, f"reward model on {task.name}, seed {run.seed}", rows)
    return accuracy, run_dir


def load(
    source: str, mesh: jax.sharding.Mesh, *, standardize: bool = True, clip: float = 0.0, rows: int = 32
) -> Scorer:
    """The reward model that `train` left in the directory `source`.

    Args:
      source: a run directory.
      mesh: where its parameters are placed, divided like the policy's.
      standardize: give the replies of its held-out pairs mean 0 and standard deviation 1.
      clip, rows: see `Scorer`.

    Raises:
      ValueError: there is no reward model; names the directory.
    """
    run_dir = RunDir(pathlib.Path(source))
    if not run_dir.config.exists():
        raise ValueError(f"reward_model.source {source!r} holds no reward model (no config.json); train one first")
    run = schema.read(RewardModelConfig, run_dir.read_config(), "config")
    task = tasks.create(run.task)
    graphdef, params = create(_model_config(run, task), run.seed, mesh)
    with Checkpoints(run_dir.checkpoints, read_only=True) as checkpoints:
        restored = checkpoints.restore(params)
    measured = restored.record["accuracy"]
    return Scorer(
        graphdef,
        restored.state,
        task.tokenizer,
        run.max_length,
        shift=measured["mean"] if standardize else 0.0,
        scale=max(measured["std"], 1e-6) if standardize else 1.0,
        clip=clip,
        rows=_rows(rows, sharding.data_shards(mesh)),
    )


def attach(task: tasks.Task, config: configs.RewardModel, mesh: jax.sharding.Mesh) -> tasks.Task:
    """`task` judged by the configured reward model; the task itself where none is configured.

    Raises:
      ValueError: there is no such model, the task takes no judge, or it needs one and has none.
    """
    if not config.source:
        if getattr(task, "judge", task) is None and task.name == "preferences":
            raise ValueError(
                f"task {task.name!r} has no rewards of its own: set config.reward_model.source to a reward model's run"
                " directory, or config.task.preferences.judge to a function"
            )
        return task
    if not hasattr(task, "with_judge"):
        raise ValueError(f"config.reward_model.source is set, but task {task.name!r} has its own rewards")
    scorer = load(config.source, mesh, standardize=config.standardize, clip=config.clip, rows=config.batch_size)
    return task.with_judge(scorer.judge)


def create(config: ModelConfig, seed: int, mesh: jax.sharding.Mesh) -> tuple[nnx.GraphDef, Any]:
    """Graph and random parameters of a `ScalarModel`, sharded as they are made."""

    def init():
        return nnx.split(ScalarModel(config, rngs=nnx.Rngs(seed)), nnx.Param)[1]

    params = jax.jit(init, out_shardings=sharding.shardings(jax.eval_shape(init), mesh))()
    graphdef = nnx.split(nnx.eval_shape(lambda: ScalarModel(config, rngs=nnx.Rngs(0))), nnx.Param)[0]
    return graphdef, params


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


def scores(graphdef: nnx.GraphDef, params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """float32 [B]: the scalar at each row's last valid token. Tokens int32 [B, L], mask bool [B, L], padding anywhere."""
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0).astype(jnp.int32)
    values = nnx.merge(graphdef, params)(tokens, positions, mask.astype(jnp.int32))
    return last_valid(values, mask)


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


def encode(examples: Sequence[Example], replies: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt, its reply and the end token."""
    prompts = tokenize(examples, tokenizer, limit=2**31).tokens
    return [
        [*prompt, *tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        for prompt, reply in zip(prompts, replies, strict=True)
    ]


def length_buckets(lengths: Sequence[int], rows: int) -> list[tuple[np.ndarray, int]]:
    """Cuts sequences, sorted by length, into batches of at most `rows`.

    Returns:
      (indices of the members, width) of each batch; widths are BUCKET times a power of two, so that few are compiled.
    """
    order = np.argsort(lengths, kind="stable")
    batches = [order[i : i + rows] for i in range(0, len(order), rows)]
    longest = [max(lengths[i] for i in members) for members in batches]
    return [(m, BUCKET * 2 ** int(np.ceil(np.log2(max(n / BUCKET, 1))))) for m, n in zip(batches, longest, strict=True)]


def pad(sequences: Sequence[Sequence[int]], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded tokens int32 [rows, width] and mask bool; rows without a sequence hold one token, to be ignored."""
    tokens, mask = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
    mask[:, 0] = True
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = True
    return tokens, mask


_scores = jax.jit(scores, static_argnums=0)


def _rows(rows: int, shards: int) -> int:
    return -(-rows // shards) * shards


def _model_config(run: RewardModelConfig, task: tasks.Task) -> ModelConfig:
    if task.tokenizer is None:
        raise ValueError(f"task {task.name!r} has no tokenizer of its own; a reward model needs one")
    fields = {"vocab_size": task.tokenizer.vocab_size, **run.model.architecture}
    fields |= run.model.runtime
    return schema.read(ModelConfig, fields, "config.model.architecture")
