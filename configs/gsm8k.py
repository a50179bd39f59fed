"""A small instruct model on GSM8K: grade-school word problems with checked answers.

    python experiments/train.py --config=configs/gsm8k.py
    python experiments/train.py --config=configs/gsm8k.py --config.model.source=/models/Qwen2.5-0.5B-Instruct \
        --config.task.mathematics.sources.gsm8k_train.path=/data/gsm8k/train.jsonl \
        --config.task.mathematics.sources.gsm8k_test.path=/data/gsm8k/test.jsonl

The first command takes model and data from the Hugging Face hub, the second one from local copies.

Hardware: one accelerator; experiments/plan_pod.py says how much memory it takes. Metric: accuracy on 500 problems of the
test set at temperature 1, the answer in the last box against the truth.
"""

from jaxrl_llm.config import default_config


def get_config():
    config = default_config()
    config.run_dir = "runs/gsm8k"
    config.model.source = "Qwen/Qwen2.5-0.5B-Instruct"
    config.model.dtype = "bfloat16"
    config.model.remat = "full"

    config.task.name = "mathematics"
    config.task.mathematics.train = "gsm8k_train"
    config.task.mathematics.evaluation = ("gsm8k_test",)

    config.rollout.prompts = 64
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 320
    config.rollout.max_response_length = 512
    config.rollout.capture_top_k = 20

    config.objective.name = "pdm"
    config.training.rollouts = 200
    config.training.updates_per_rollout = 4
    config.training.micro_batches = 8
    config.optimizer.learning_rate = 1e-6
    config.optimizer.b2 = 0.95
    config.optimizer.warmup_steps = 10

    config.evaluation.every = 20
    config.evaluation.prompts = 500
    config.checkpoint.every = 20
    return config
