"""`ModelConfig` from a Hugging Face configuration and back.

transformers itself reads config.json, so defaults and older spellings are its business; here its fields are translated,
and a model that this package would compute differently is refused by the name of the field.
"""

from typing import Any

import transformers

from jaxrl_llm import schema
from jaxrl_llm.models.config import RUNTIME, DeltaNetConfig, ModelConfig, MoEConfig, RopeScaling

# model_type -> the fields of `ModelConfig` that the type itself decides.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "attention_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "qwen3_5_text": {"qk_norm": True, "zero_centred_norm": True, "attention_gate": True},
    "qwen3_5_moe_text": {"qk_norm": True, "zero_centred_norm": True, "attention_gate": True},
}
# Fields whose other values change the computation in ways that are not implemented.
ONLY: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None}


def from_transformers(config: transformers.PretrainedConfig, name: str, **fields: Any) -> ModelConfig:
    """The architecture of a transformers configuration.

    Args:
      config: of one of `FAMILIES`.
      name: of the checkpoint, for messages.
      **fields: what no checkpoint decides (`config.RUNTIME`).

    Raises:
      ValueError: an unknown model_type or a feature that is not implemented; names the field.
    """
    family = schema.choose(FAMILIES, config.model_type, f"model_type of {name}")
    for field, value in ONLY.items():
        found = getattr(config, field, value)
        schema.require(found == value, f"{field} of {name}", found, f"{value!r}; nothing else is implemented")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name} has a quantization_config; only checkpoints that are not quantised can be read")
    rope = config.rope_parameters
    kinds = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    for kind in kinds:
        known = ("full_attention", "linear_attention")
        schema.require(kind in known, f"layer_types of {name}", kind, " or ".join(known))
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        # A mixture without dense layers may have no width for them.
        intermediate_size=getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_rope_scaling(rope, name),
        partial_rotary=rope.get("partial_rotary_factor", 1.0),
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        layer_types=tuple(config.layer_types) if "linear_attention" in kinds else (),
        moe=_moe(config),
        delta_net=_delta_net(config),
        **(family | fields),
    )


def to_transformers(config: ModelConfig) -> transformers.PretrainedConfig:
    """The transformers configuration of an architecture that has no checkpoint to take it from.

    Raises:
      ValueError: a combination that no model type of transformers has.
    """
    c = config
    fields: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings,
        "rope_parameters": _rope_parameters(c),
    }
    if c.moe.num_experts:
        fields |= {
            "num_experts": c.moe.num_experts,
            "num_experts_per_tok": c.moe.experts_per_token,
            "moe_intermediate_size": c.moe.intermediate_size,
            "norm_topk_prob": c.moe.norm_topk_prob,
            "decoder_sparse_step": c.moe.sparse_step,
            "mlp_only_layers": list(c.moe.dense_layers),
            "shared_expert_intermediate_size": c.moe.shared_expert_size,
        }
    if c.zero_centred_norm:
        kind = "qwen3_5_moe_text" if c.moe.num_experts else "qwen3_5_text"
        fields["layer_types"] = list(c.layer_types) or ["full_attention"] * c.num_layers
        fields |= {theirs: getattr(c.delta_net, ours) for theirs, ours in DELTA_NET.items()}
    elif c.moe.num_experts:
        kind = "qwen3_moe"
    else:
        kind = "qwen3" if c.qk_norm else "qwen2" if c.attention_bias else "llama"
    theirs = transformers.AutoConfig.for_model(kind, **fields)
    runtime = {name: getattr(c, name) for name in RUNTIME}
    if from_transformers(theirs, "the architecture", **runtime) != c:
        raise ValueError(
            f"no model type of transformers computes what this architecture does ({kind} comes nearest): {c}"
        )
    return theirs


DELTA_NET = {
    "linear_num_key_heads": "num_key_heads",
    "linear_num_value_heads": "num_value_heads",
    "linear_key_head_dim": "key_head_dim",
    "linear_value_head_dim": "value_head_dim",
    "linear_conv_kernel_dim": "conv_size",
}


def _delta_net(config: transformers.PretrainedConfig) -> DeltaNetConfig:
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return DeltaNetConfig()
    return DeltaNetConfig(**{ours: getattr(config, theirs) for theirs, ours in DELTA_NET.items()})


def _moe(config: transformers.PretrainedConfig) -> MoEConfig:
    if not getattr(config, "num_experts", 0):
        return MoEConfig()
    return MoEConfig(
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        norm_topk_prob=getattr(config, "norm_topk_prob", True),
        sparse_step=getattr(config, "decoder_sparse_step", 1),
        dense_layers=tuple(getattr(config, "mlp_only_layers", None) or ()),
        shared_expert_size=getattr(config, "shared_expert_intermediate_size", 0),
    )


def _rope_scaling(rope: dict[str, Any], name: str) -> RopeScaling:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return RopeScaling()
    schema.require(kind in ("linear", "llama3"), f"rope_type of {name}", kind, "default, linear or llama3")
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    factors = (float(rope[field]) for field in ("factor", "low_freq_factor", "high_freq_factor"))
    return RopeScaling("llama3", *factors, rope["original_max_position_embeddings"])


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    scaling, rope = config.rope_scaling, {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.partial_rotary != 1:
        rope["partial_rotary_factor"] = config.partial_rotary
    if scaling.kind != "none":
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return rope
