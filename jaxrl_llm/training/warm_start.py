"""Supervised learning on a task's worked solutions, before RL begins."""

from typing import Any

from jax.sharding import Mesh
from rich.console import Console

from jaxrl_llm import config as configs
from jaxrl_llm import objectives, processes, schema, tasks
from jaxrl_llm.axes import round_up
from jaxrl_llm.config import RunConfig
from jaxrl_llm.experience import batches
from jaxrl_llm.experience.data_order import example_indices
from jaxrl_llm.experience.policy import Policy
from jaxrl_llm.experience.prompts import tokenize
from jaxrl_llm.learning import optimizer as optimizers
from jaxrl_llm.learning import trainer as trainers
from jaxrl_llm.learning.step import Forward, TrainStep
from jaxrl_llm.parallel import sharding
from jaxrl_llm.records import progress
from jaxrl_llm.training.signals import StopSignals
from jaxrl_llm.types import Batch


def check(run: RunConfig, task: tasks.Task) -> None:
    """Refuses a warm start on a task without worked solutions."""
    # Looking at the first step's examples is enough for a task that has no solutions at all, and cheap for any task.
    steps, right = run.warm_start.steps, f"0: task {task.name!r} has examples without a worked solution"
    worked = steps == 0 or all(example.solution for example in _examples(run, task, 0))
    schema.require(worked, "config.warm_start.steps", steps, right)


def learn(run: RunConfig, task: tasks.Task, policy: Policy, mesh: Mesh, console: Console, stop: StopSignals) -> Any:
    """The policy's parameters after `run.warm_start.steps` steps of cross-entropy, or as many as a stop leaves time for.

    Raises:
      ValueError: a solution longer than the responses that the run allows; names the field.
    """
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
            batch = _demonstrations(run, _examples(run, task, i), policy)
            state, metrics = step(state, sharding.spread(batch, mesh))
            if (i + 1) % 10 == 0 or i + 1 == warm.steps:
                bar.update(i + 1, {"loss": float(processes.fetch(metrics["loss"].numerator))})
    return state.params


def _examples(run: RunConfig, task: tasks.Task, step: int) -> list[tasks.Example]:
    """Those of one step, from a stream of its own."""
    size = run.warm_start.batch_size
    return [task.train[j] for j in example_indices(run.seed + 1, step * size, size, len(task.train))]


def _demonstrations(run: RunConfig, examples: list[tasks.Example], policy: Policy) -> Batch:
    """The worked solutions as if they had been sampled."""
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
    width = round_up(max(map(len, prompts.tokens)), 4)
    return batches.from_pairs(prompts.tokens, responses, width, run.rollout.max_response_length, policy.pad_id)
