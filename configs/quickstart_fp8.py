"""The quickstart with an FP8 sampler: logits, weights, activations and cache rounded to e4m3 in the rollout only.

    python experiments/train.py --config=configs/quickstart_fp8.py

What the trainer sees as mismatch is in the metrics under mismatch/ and in the plots.

Hardware: 2 CPU cores, a few minutes. Metric: accuracy at temperature 1 on held-out prompts.
"""

from jaxrl_llm.config import files as config_files


def get_config():
    config = config_files.beside(__file__, "quickstart.py").get_config()
    config.run_dir = "runs/quickstart_fp8"
    config.rollout.fp8.scope = "rollout_only"
    for site in ("logits", "weights", "activations", "kv_cache"):
        config.rollout.fp8[site] = "e4m3"
    return config
