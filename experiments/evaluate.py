"""avg@k and pass@k, with 95 % intervals over prompts, of any checkpoint of a run on any task.

python experiments/evaluate.py --run_dir=runs/quickstart --samples=16
python experiments/evaluate.py --run_dir=runs/quickstart --checkpoint=30 --samples=16 --temperature=0.7 --top_p=0.95
"""

import functools

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from jaxrl_llm import schema, tasks
from jaxrl_llm.api import command_line, loaded_run
from jaxrl_llm.experience.evaluation import evaluate, pass_at
from jaxrl_llm.experience.prompts import tokenize
from jaxrl_llm.parallel import sharding
from jaxrl_llm.records import progress
from jaxrl_llm.reward_models import reward_model
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.rollout.slots import SamplingConfig

_RUN_DIR = flags.DEFINE_string("run_dir", None, "A run's directory.", required=True)
_CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "Rollout of the checkpoint; the newest by default.")
_TASK = flags.DEFINE_string(
    "task", None, "Another task than the run's, with the fields that the run's config has for it."
)
_PROMPTS = flags.DEFINE_integer("prompts", None, "Prompts of each held-out set; all by default.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 16, "Completions of each prompt.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Longest completion; the run's limit by default.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0 is greedy.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "1 keeps all.")
_SLOTS = flags.DEFINE_integer("slots", 256, "Sequences decoded at once.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")


def main():
    console, samples = Console(), _SAMPLES.value
    choice = Choice(temperature=_TEMPERATURE.value, top_p=_TOP_P.value)
    run = loaded_run.load(_RUN_DIR.value, _CHECKPOINT.value, console.print)
    task, policy = run.task, run.policy
    if _TASK.value is not None:
        task = tasks.create({**run.run.task, "name": _TASK.value})
        fits = task.tokenizer is None or task.tokenizer == policy.tokenizer
        schema.require(fits, "--task", _TASK.value, "a task in the vocabulary that the policy was trained with")
    if task.name == "preferences":  # whose grades are its judge's
        task = reward_model.attach(task, run.run.reward_model, sharding.reading_mesh(run.run.mesh))
    length = _MAX_TOKENS.value or run.run.rollout.max_response_length
    config = SamplingConfig(length, policy.stop_ids, policy.pad_id, choice, slots=_SLOTS.value)
    sampler = Sampler(policy.graphdef, policy.config, config)

    table = Table(title=f"checkpoint {run.rollout} of {_RUN_DIR.value}: {samples} samples a prompt, {choice}")
    for column in ("set", "prompts", f"avg@{samples}", "pass@k", "length", "truncated"):
        table.add_column(column)
    for name, examples in task.evaluation.items():
        prompts = tokenize(examples[: _PROMPTS.value or len(examples)], policy.tokenizer, limit=2**30)
        with progress.bar(console, name, len(prompts) * samples) as bar:
            reporting = functools.partial(sampler, report=progress.SamplingPace(bar))
            found = evaluate(
                reporting, policy.params, task, policy.tokenizer, prompts, jax.random.key(_SEED.value), samples
            )
        passes = "\n".join(
            f"@{k}: {100 * value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
            for k, (value, low, high) in pass_at(found.scored, samples).items()
        )
        row = (name, str(len(prompts)), str(found), passes, f"{found.length:.1f}", f"{100 * found.truncated:.1f} %")
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    command_line.run(main)
