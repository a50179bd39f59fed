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
class ModelConfig:
    """A Llama / Qwen2 / Qwen3 decoder.

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
