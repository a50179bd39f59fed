"""Architectures of the papers' policies by the name of their checkpoint, for planning without a download.

Each is its checkpoint's config.json in the fields of `ModelConfig`.
"""

from typing import Any

from jaxrl_llm import schema

_QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "qk_norm": True}
_QWEN3_4B = _QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_layers": 36,
    "num_heads": 32,
    "num_kv_heads": 8,
    "tie_word_embeddings": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-Base": _QWEN3_4B,
    "Qwen/Qwen3-8B": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_layers": 36,
        "num_heads": 32,
        "num_kv_heads": 8,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": _QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_layers": 48,
        "num_heads": 32,
        "num_kv_heads": 4,
        "tie_word_embeddings": False,
        "moe": {"num_experts": 128, "experts_per_token": 8, "intermediate_size": 768, "norm_topk_prob": True},
    },
    "Qwen/Qwen3.5-35B-A3B": {
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "intermediate_size": 512,  # no layer is dense
        "num_layers": 40,
        "num_heads": 16,
        "num_kv_heads": 2,
        "head_dim": 256,
        "rope_theta": 1e7,
        "partial_rotary": 0.25,
        "rms_norm_eps": 1e-6,
        "zero_centred_norm": True,
        "qk_norm": True,
        "attention_gate": True,
        "layer_types": (("linear_attention",) * 3 + ("full_attention",)) * 10,
        "tie_word_embeddings": False,
        "moe": {"num_experts": 256, "experts_per_token": 8, "intermediate_size": 512, "shared_expert_size": 512},
        "delta_net": {
            "num_key_heads": 16,
            "num_value_heads": 32,
            "key_head_dim": 128,
            "value_head_dim": 128,
            "conv_size": 4,
        },
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_layers": 28,
        "num_heads": 12,
        "num_kv_heads": 2,
        "head_dim": 128,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "qk_norm": False,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "rope_theta": 5e5,
        "rope_scaling": {"kind": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "rms_norm_eps": 1e-5,
        "qk_norm": False,
        "tie_word_embeddings": True,
    },
}


def architecture(source: str) -> dict[str, Any]:
    """Fields of `ModelConfig` for the checkpoint `source`.

    Raises:
      ValueError: a checkpoint that is not in the table.
    """
    return schema.choose(PRESETS, source, "checkpoint config.model.source")
