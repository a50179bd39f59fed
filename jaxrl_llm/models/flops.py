"""What a forward pass costs by its matrix products, counted from the architecture."""

from jaxrl_llm.models.config import ModelConfig


def forward_flops(model: ModelConfig, rows: int, length: int, unembedded: int) -> float:
    """Matrix FLOPs of the model's forward over `rows` sequences of `length` tokens, attention causal, delta nets token by token.

    Args:
      model: the architecture.
      rows, length: sequences and their length.
      unembedded: tokens whose logits are computed.
    """
    tokens = rows * length
    columns = (length + 1) / 2  # that a token attends to, on average
    layers = _layers_without_columns(model) + columns * _layers_per_column(model)
    return 2.0 * (tokens * layers + unembedded * model.hidden_size * model.vocab_size)


def attention_share(model: ModelConfig) -> float:
    """What attending to one more column costs a token, as a share of all else that the layers do for it."""
    return _layers_per_column(model) / _layers_without_columns(model)


def _layers_per_column(model: ModelConfig) -> int:
    """Multiplications of a token's products with one earlier key and its value, in all layers."""
    attending = sum(kind.mixer == "full_attention" for kind in model.layer_kinds)
    return 2 * attending * model.num_heads * model.head_dim


def _layers_without_columns(model: ModelConfig) -> int:
    """Multiplications of a token in all layers, whatever it attends to."""
    c, net, moe = model, model.delta_net, model.moe
    attention = c.hidden_size * c.head_dim * ((3 if c.attention_gate else 2) * c.num_heads + 2 * c.num_kv_heads)
    linear = (
        c.hidden_size * (net.channels + 2 * net.value_width + 2 * net.num_value_heads) + net.conv_size * net.channels
    )
    linear += 3 * net.value_width * net.key_head_dim  # the memory is asked, corrected and read
    routed = c.hidden_size * (moe.num_experts + 3 * moe.experts_per_token * moe.intermediate_size)
    routed += c.hidden_size * (3 * moe.shared_expert_size + (moe.shared_expert_size > 0))
    mixers = {"full_attention": attention, "linear_attention": linear}
    feed_forwards = {"dense": 3 * c.hidden_size * c.intermediate_size, "moe": routed}
    return sum(mixers[kind.mixer] + feed_forwards[kind.feed_forward] for kind in c.layer_kinds)
