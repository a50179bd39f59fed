"""DeepSeek-R1-Distill-Qwen-1.5B with the divergence mask of DPPO in its stability runs (arXiv 2602.04879): TV 0.15.

    python experiments/train.py --config=configs/r1_distill_1_5b_dppo.py
    python experiments/plan_pod.py --config=configs/r1_distill_1_5b_dppo.py --topology=v5p:4x4x4

Hardware: a TPU slice that experiments/plan_pod.py says it fits. Metric: avg@16 on AIME 2024 and 2025.
"""

from jaxrl_llm.config import files as config_files


def get_config():
    config = config_files.beside(__file__, "qwen3_4b_dapo.py").get_config("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
    config.run_dir = "runs/r1_distill_1_5b_dppo"
    config.rollout.max_response_length = 8000
    config.rollout.capture_top_k = 0  # the binary divergence needs the sampled token's log-prob only
    config.objective.name = "dppo"
    config.objective.dppo.divergence = "binary_tv"
    config.objective.dppo.delta_low = 0.15
    config.objective.dppo.delta_high = 0.15
    return config
