"""Completions of your own prompts by a trained policy, as JSON lines.

    python experiments/generate.py --run_dir=runs/quickstart --prompt="3+4-2=" --prompt="9-1+8=" --samples=4
    python experiments/generate.py --run_dir=runs/quickstart --prompts_file=prompts.txt --out=completions.jsonl

A prompt file has one prompt a line or, as .jsonl, objects with a field "prompt" (text or chat messages).
"""

import json
import pathlib

from absl import flags
from rich.console import Console

import jaxrl_llm as jrl
from jaxrl_llm.api import command_line
from jaxrl_llm.experience import generation
from jaxrl_llm.records import progress

_RUN_DIR = flags.DEFINE_string("run_dir", None, "A run's directory.", required=True)
_CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "Rollout of the checkpoint; the newest by default.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; may be given several times.")
_FILE = flags.DEFINE_string("prompts_file", None, "A file of prompts.")
_OUT = flags.DEFINE_string("out", None, "Where the lines go; the terminal by default.")
_SAMPLES = flags.DEFINE_integer("samples", 1, "Completions of each prompt.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Longest completion; the run's limit by default.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0 is greedy.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "0 keeps all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "1 keeps all.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "0 keeps all.")
_SLOTS = flags.DEFINE_integer("slots", 64, "Sequences decoded at once.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")


def main():
    console = Console(stderr=True)
    examples = generation.read_prompts(_PROMPT.value, _FILE.value)
    policy = jrl.load(_RUN_DIR.value, _CHECKPOINT.value, report=console.print)
    with progress.bar(console, "generate", len(examples) * _SAMPLES.value) as bar:
        live = progress.SamplingPace(bar)
        completions = policy.sample(
            [example.prompt for example in examples],
            _SAMPLES.value,
            temperature=_TEMPERATURE.value,
            top_k=_TOP_K.value,
            top_p=_TOP_P.value,
            min_p=_MIN_P.value,
            max_tokens=_MAX_TOKENS.value,
            slots=_SLOTS.value,
            seed=_SEED.value,
            report=live,
        )
    lines = "".join(json.dumps(completion.line()) + "\n" for completion in completions)
    if _OUT.value is None:
        print(lines, end="")
    else:
        pathlib.Path(_OUT.value).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(_OUT.value).write_text(lines)
    progress.summary(
        console,
        policy.name,
        live.summary() | {"completions": _OUT.value or "above"},
    )


if __name__ == "__main__":
    command_line.run(main)
