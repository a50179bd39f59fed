"""What a forward pass costs, counted by hand."""

from jaxrl_llm.models import flops
from jaxrl_llm.models.config import DeltaNetConfig, ModelConfig, MoEConfig


def test_flops_of_the_model_by_hand():
    model = ModelConfig(
        vocab_size=10, hidden_size=4, intermediate_size=6, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2
    )
    # One sequence of 3 tokens. Projections 4x4, 4x2 twice, 4x4; feed-forward 3 of 4x6; scores and sums of 1 + 2 + 3 keys.
    products = 3 * (16 + 8 + 8 + 16 + 3 * 24) + 2 * (1 + 2 + 3) * 4
    assert flops.forward_flops(model, 1, 3, 2) == 2 * (products + 2 * 4 * 10)
    # One column: a score and a share of the values for each of 2 heads of 2.
    assert flops.attention_share(model) == (2 * 4) / (16 + 8 + 8 + 16 + 3 * 24)


def test_flops_of_a_gated_delta_net_with_experts_by_hand():
    model = ModelConfig(
        vocab_size=10,
        hidden_size=4,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        attention_gate=True,
        layer_types=("linear_attention", "full_attention"),
        moe=MoEConfig(num_experts=5, experts_per_token=2, intermediate_size=3, shared_expert_size=7),
        delta_net=DeltaNetConfig(num_key_heads=1, num_value_heads=2, key_head_dim=3, value_head_dim=2, conv_size=4),
    )
    # Per token. Delta net: query and key of 3, two values of 2 and their gate, rate and decay, out 4x4; a window of 4 over 10
    # channels; two memories of 3x2, three times. Attention: query, gate and out 4x4, key and value 4x2. Feed-forward: router,
    # two experts of 3x(4x3), the shared one of 3x(4x7) and its gate.
    delta = 4 * (3 + 3 + 4) + 4 * 4 + 2 * 4 * 2 + 4 * 4 + 4 * 10 + 3 * 2 * (3 * 2)
    attention = 3 * 16 + 2 * 8
    experts = 4 * 5 + 2 * 36 + 84 + 4
    products = 3 * (delta + attention + 2 * experts) + 2 * (1 + 2 + 3) * 4
    assert flops.forward_flops(model, 1, 3, 2) == 2 * (products + 2 * 4 * 10)
    assert flops.attention_share(model) == (2 * 4) / (delta + attention + 2 * experts)
