"""Architecture of a decoder as a frozen, hashable record."""

import dataclasses
from typing import Literal

from jaxrl_llm import schema


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of Llama 3.x ("llama3") or plain position interpolation ("linear").

    Attributes:
      kind: which rule; "none" leaves the frequencies alone.
      factor: by which long wavelengths are stretched.
      low_freq_factor, high_freq_factor, original_max_positions: bounds of the band that "llama3" interpolates in.
    """

    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in place of the feed-forward layer (Qwen3-MoE, Qwen3.5-MoE).

    Attributes:
      num_experts: E; 0 for none.
      experts_per_token: experts that each token goes through (k).
      intermediate_size: width of one expert.
      norm_topk_prob: the chosen experts' gates are divided by their sum.
      shared_expert_size: width of an expert that every token goes through, behind a sigmoid gate; 0 for none.
      sparse_step: every how many layers the feed-forward layer is a mixture (`decoder_sparse_step`).
      dense_layers: layers that keep a plain feed-forward layer nevertheless (`mlp_only_layers`).
    """

    num_experts: int = 0
    experts_per_token: int = 1
    intermediate_size: int = 128
    norm_topk_prob: bool = True
    shared_expert_size: int = 0
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("num_experts", "shared_expert_size"):
            schema.require(getattr(self, name) >= 0, f"model.moe.{name}", getattr(self, name), "0 or more")
        for name in ("intermediate_size", "sparse_step"):
            schema.require(getattr(self, name) > 0, f"model.moe.{name}", getattr(self, name), "positive")
        schema.require(
            self.experts_per_token in range(1, max(self.num_experts, 1) + 1),
            "model.moe.experts_per_token",
            self.experts_per_token,
            f"between 1 and num_experts = {self.num_experts}",
        )


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Gated delta net in place of attention (Qwen3.5).

    Attributes:
      num_key_heads, num_value_heads: adjacent value heads share a key head.
      key_head_dim, value_head_dim: width of one head.
      conv_size: tokens that the short convolution sees.
    """

    num_key_heads: int = 2
    num_value_heads: int = 4
    key_head_dim: int = 32
    value_head_dim: int = 32
    conv_size: int = 4

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            schema.require(value > 0, f"model.delta_net.{field.name}", value, "positive")
        schema.require(
            self.num_value_heads % self.num_key_heads == 0,
            "model.delta_net.num_key_heads",
            self.num_key_heads,
            f"a divisor of num_value_heads = {self.num_value_heads}",
        )

    @property
    def key_width(self) -> int:
        """Width of all keys together."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all values together."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Width of query, key and value together, which the convolution runs over."""
        return 2 * self.key_width + self.value_width


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What one layer is made of."""

    mixer: Literal["full_attention", "linear_attention"] = "full_attention"
    feed_forward: Literal["dense", "moe"] = "dense"


# Fields of `ModelConfig` that say how to compute, not what: no checkpoint decides them.
RUNTIME = ("dtype", "param_dtype", "scan_unroll", "remat", "attention")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama / Qwen2 / Qwen3 / Qwen3-MoE / Qwen3.5 / Qwen3.5-MoE decoder.

    Attributes:
      vocab_size: V.
      hidden_size: width of the residual stream (D).
      intermediate_size: width of the gated feed-forward layer.
      num_layers, num_heads, num_kv_heads, head_dim: as in the checkpoints' config.json.
      rope_theta: base of the rotary frequencies.
      rope_scaling: see `RopeScaling`.
      partial_rotary: share of each head's components that is rotated.
      rms_norm_eps: added under the root of the norms.
      zero_centred_norm: norms scale by 1 + weight (Qwen3.5).
      qk_norm: RMS-normalise each head's query and key (Qwen3).
      attention_bias: biases on query, key and value (Qwen2).
      attention_gate: the attended values pass a sigmoid gate (Qwen3.5).
      layer_types: how each layer mixes tokens, attention or gated delta net (linear attention); empty for attention
        everywhere.
      tie_word_embeddings: the unembedding is the transposed embedding.
      moe: see `MoEConfig`.
      delta_net: see `DeltaNetConfig`.
      dtype: of the computation; norms, softmax and logits are float32 in any case.
      param_dtype: of the parameters.
      scan_unroll: layers written out per iteration of the training forward's loop; num_layers for none at all (faster on
        CPU, where a loop hides its body from the other optimisations; slower to compile).
      remat: what the backward pass recomputes: nothing, all but matrix products, or whole layers.
      attention: kernel of the forward over whole sequences, see `kernels`.
    """

    vocab_size: int = 64
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = dataclasses.field(default_factory=RopeScaling)
    partial_rotary: float = 1.0
    rms_norm_eps: float = 1e-6
    zero_centred_norm: bool = False
    qk_norm: bool = True
    attention_bias: bool = False
    attention_gate: bool = False
    layer_types: tuple[Literal["full_attention", "linear_attention"], ...] = ()
    tie_word_embeddings: bool = True
    moe: MoEConfig = dataclasses.field(default_factory=MoEConfig)
    delta_net: DeltaNetConfig = dataclasses.field(default_factory=DeltaNetConfig)
    dtype: Literal["float32", "bfloat16"] = "float32"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    scan_unroll: int = 1
    remat: Literal["none", "dots", "full"] = "none"
    attention: Literal["auto", "xla", "splash", "cudnn"] = "auto"

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            schema.require(getattr(self, name) > 0, f"model.{name}", getattr(self, name), "positive")
        schema.require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads = {self.num_heads}",
        )
        schema.require(self.head_dim % 2 == 0, "model.head_dim", self.head_dim, "even (rotary pairs)")
        right = "a share in (0, 1] that leaves an even number of a head's components"
        fits = 0 < self.partial_rotary <= 1 and self.rotary_dim % 2 == 0
        schema.require(fits, "model.partial_rotary", self.partial_rotary, right)
        types = self.layer_types
        schema.require(
            len(types) in (0, self.num_layers), "model.layer_types", types, f"{self.num_layers} long, or empty"
        )
        right = f"layers between 0 and {self.num_layers - 1}"
        dense = self.moe.dense_layers
        schema.require(set(dense) <= set(range(self.num_layers)), "model.moe.dense_layers", dense, right)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        moe, types = self.moe, self.layer_types or ("full_attention",) * self.num_layers
        sparse = [
            moe.num_experts > 0 and i not in moe.dense_layers and (i + 1) % moe.sparse_step == 0
            for i in range(self.num_layers)
        ]
        return tuple(LayerKind(t, "moe" if s else "dense") for t, s in zip(types, sparse, strict=True))

    @property
    def rotary_dim(self) -> int:
        """Components of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary)

    @property
    def period(self) -> int:
        """Layers after which the kinds repeat to the end; the training forward scans over whole periods."""
        kinds = self.layer_kinds
        sizes = (n for n in range(1, self.num_layers + 1) if self.num_layers % n == 0)
        return next(n for n in sizes if kinds == kinds[:n] * (self.num_layers // n))

    @property
    def num_moe_layers(self) -> int:
        """Layers with a router."""
        return sum(kind.feed_forward == "moe" for kind in self.layer_kinds)
