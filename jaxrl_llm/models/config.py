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
    """Mixture of experts in place of the feed-forward layer (Qwen3-MoE).

    Attributes:
      num_experts: E; 0 for none.
      experts_per_token: experts that each token goes through (k).
      intermediate_size: width of one expert.
      norm_topk_prob: the chosen experts' gates are divided by their sum.
      sparse_step: every how many layers the feed-forward layer is a mixture (`decoder_sparse_step`).
      dense_layers: layers that keep a plain feed-forward layer nevertheless (`mlp_only_layers`).
    """

    num_experts: int = 0
    experts_per_token: int = 1
    intermediate_size: int = 128
    norm_topk_prob: bool = True
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self):
        schema.require(self.num_experts >= 0, "model.moe.num_experts", self.num_experts, "0 or more")
        for name in ("intermediate_size", "sparse_step"):
            schema.require(getattr(self, name) > 0, f"model.moe.{name}", getattr(self, name), "positive")
        schema.require(
            self.experts_per_token in range(1, max(self.num_experts, 1) + 1),
            "model.moe.experts_per_token",
            self.experts_per_token,
            f"between 1 and num_experts = {self.num_experts}",
        )


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What one layer is made of."""

    feed_forward: Literal["dense", "moe"] = "dense"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama / Qwen2 / Qwen3 / Qwen3-MoE decoder.

    Attributes:
      vocab_size: V.
      hidden_size: width of the residual stream (D).
      intermediate_size: width of the gated feed-forward layer.
      num_layers, num_heads, num_kv_heads, head_dim: as in the checkpoints' config.json.
      rope_theta: base of the rotary frequencies.
      rope_scaling: see `RopeScaling`.
      rms_norm_eps: added under the root of the norms.
      qk_norm: RMS-normalise each head's query and key (Qwen3).
      attention_bias: biases on query, key and value (Qwen2).
      tie_word_embeddings: the unembedding is the transposed embedding.
      moe: see `MoEConfig`.
      dtype: of the computation; norms, softmax and logits are float32 in any case.
      param_dtype: of the parameters.
      scan_unroll: layers written out per iteration of the training forward's loop; num_layers for none at all (faster on
        CPU, where a loop hides its body from the other optimisations; slower to compile).
      remat: what the backward pass recomputes: nothing, all but matrix products, or whole layers.
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
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    moe: MoEConfig = dataclasses.field(default_factory=MoEConfig)
    dtype: Literal["float32", "bfloat16"] = "float32"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    scan_unroll: int = 1
    remat: Literal["none", "dots", "full"] = "none"

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
        right = f"layers between 0 and {self.num_layers - 1}"
        dense = self.moe.dense_layers
        schema.require(set(dense) <= set(range(self.num_layers)), "model.moe.dense_layers", dense, right)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        moe = self.moe
        sparse = [
            moe.num_experts > 0 and i not in moe.dense_layers and (i + 1) % moe.sparse_step == 0
            for i in range(self.num_layers)
        ]
        return tuple(LayerKind("moe" if s else "dense") for s in sparse)

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
