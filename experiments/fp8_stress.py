"""What each site of FP8 emulation costs: the sampler's log-probs against the trainer's, site by site.

    python experiments/fp8_stress.py --run_dir=runs/quickstart

Each line samples anew with one site emulated (the last ones with all of them) and lets the trainer, which emulates
nothing, score the same tokens. The first line is the bound without emulation: float32 rounding of two programs.
"""

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from jaxrl_llm.rollout.slots import SamplingConfig
from jaxrl_llm.training import command_line, mismatch, progress, saved
from jaxrl_llm.training.collect import tokenize

_RUN_DIR = flags.DEFINE_string("run_dir", None, "A run's directory.", required=True)
_CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "Rollout of the checkpoint; the newest by default.")
_PROMPTS = flags.DEFINE_integer("prompts", 64, "Training prompts asked.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Completions of each.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")


def main():
    console = Console()
    run = saved.load(_RUN_DIR.value, _CHECKPOINT.value, console.print)
    policy, rollout = run.policy, run.run.rollout
    prompts = tokenize(run.task.train[: _PROMPTS.value], policy.tokenizer, rollout.max_prompt_length)
    config = SamplingConfig(rollout.max_response_length, policy.stop_ids, policy.pad_id)
    table = Table(title=f"log pi - log mu, checkpoint {run.rollout} of {_RUN_DIR.value}")
    for column in ("emulated", "mean |log r|", "max |log r|", "KL (k3)", "tokens"):
        table.add_column(column, justify="left" if column == "emulated" else "right")
    cases = mismatch.cases()
    with progress.bar(console, "mismatch", len(cases)) as bar:
        for done, (name, sites) in enumerate(cases.items(), 1):
            found = mismatch.measure(
                policy.graphdef,
                policy.config,
                policy.params,
                config,
                sites,
                prompts.tokens,
                jax.random.key(_SEED.value),
                _SAMPLES.value,
            )
            numbers = (f"{value:.2e}" for value in (found.mean, found.max, found.k3))
            table.add_row(name, *numbers, str(found.tokens))
            bar.update(done, {"mean |log r|": found.mean})
    console.print(table)


if __name__ == "__main__":
    command_line.run(main)
