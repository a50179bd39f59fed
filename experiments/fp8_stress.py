"""What each site of FP8 emulation costs: the sampler's log-probs against the trainer's, site by site.

    python experiments/fp8_stress.py --run_dir=runs/quickstart
    python experiments/fp8_stress.py --config=configs/smollm2_arith.py --prompts=8 --samples=4

The policy is that of a run's checkpoint or, with --config, the one that training would begin with. Each line samples anew
with one site emulated (the last ones with all of them) and lets the trainer, which emulates nothing, score the same
tokens. The first line is the bound without emulation: float32 rounding of two programs.
"""

import jax
from absl import flags
from ml_collections import config_flags
from rich.console import Console
from rich.table import Table

from jaxrl_llm import tasks
from jaxrl_llm.analysis import mismatch
from jaxrl_llm.api import command_line, loaded_run
from jaxrl_llm.config import RunConfig
from jaxrl_llm.experience import policy
from jaxrl_llm.experience.policy import Policy
from jaxrl_llm.experience.prompts import tokenize
from jaxrl_llm.parallel import sharding
from jaxrl_llm.records import progress
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.slots import SamplingConfig
from jaxrl_llm.tasks import Task

_RUN_DIR = flags.DEFINE_string("run_dir", None, "A run's directory.")
_CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "Rollout of the checkpoint; the newest by default.")
_CONFIG = config_flags.DEFINE_config_file("config", None, "In place of a run, an experiment: a file under configs/.")
_PROMPTS = flags.DEFINE_integer("prompts", 64, "Training prompts asked.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Completions of each.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")


def load(console: Console) -> tuple[RunConfig, Task, Policy, str]:
    """Configuration, task, policy, and what to call the policy."""
    if (_RUN_DIR.value is None) == (_CONFIG.value is None):
        raise ValueError("give either --run_dir or --config")
    if _RUN_DIR.value is not None:
        found = loaded_run.load(_RUN_DIR.value, _CHECKPOINT.value, console.print)
        return found.run, found.task, found.policy, f"checkpoint {found.rollout} of {_RUN_DIR.value}"
    run = RunConfig.read(_CONFIG.value)
    task = tasks.create(run.task)
    return run, task, policy.create(run, task, sharding.create_mesh(run.mesh)), f"where {run.run_dir} begins"


def main():
    console = Console()
    run, task, behavior, name = load(console)
    prompts = tokenize(task.train[: _PROMPTS.value], behavior.tokenizer, run.rollout.max_prompt_length)
    choice = Choice(run.rollout.temperature)
    config = SamplingConfig(run.rollout.max_response_length, behavior.stop_ids, behavior.pad_id, choice)
    table = Table(title=f"log pi - log mu, {name}")
    for column in ("emulated", "mean |log r|", "max |log r|", "KL (k3)", "tokens"):
        table.add_column(column, justify="left" if column == "emulated" else "right")
    cases = mismatch.cases()
    with progress.bar(console, "mismatch", len(cases)) as bar:
        for done, (case, sites) in enumerate(cases.items(), 1):
            found = mismatch.measure(
                behavior.graphdef,
                behavior.config,
                behavior.params,
                config,
                sites,
                prompts.tokens,
                jax.random.key(_SEED.value),
                _SAMPLES.value,
            )
            numbers = (f"{value:.2e}" for value in (found.mean, found.max, found.k3))
            table.add_row(case, *numbers, str(found.tokens))
            bar.update(done, {"mean |log r|": found.mean})
    console.print(table)


if __name__ == "__main__":
    command_line.run(main)
