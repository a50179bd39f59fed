"""The decoder against transformers (torch), its decode against its own whole-sequence forward, and padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.models.decoder import Decoder, unstack_layers
from tests import tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

COMMON = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
CASES = {
    "qwen3_tied": (
        "Qwen3",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
        {},
    ),
    "qwen3_odd_heads": (
        "Qwen3",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": False},
        {},
    ),
    "qwen2": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}, {}),
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}, {}),
    "llama3_scaling": (
        "Llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "max_position_embeddings": 64,
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
}
# Place of each tensor of a transformers layer in ours.
LAYER = {
    "input_layernorm.weight": "attention_norm.scale",
    "post_attention_layernorm.weight": "feed_forward_norm.scale",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm.weight": "attention.query_norm.scale",
    "self_attn.k_norm.weight": "attention.key_norm.scale",
    "mlp.gate_proj": "feed_forward.gate",
    "mlp.up_proj": "feed_forward.up",
    "mlp.down_proj": "feed_forward.down",
}


def pair(name, theta=5000.0):
    """The same random model in transformers and here."""
    family, fields, scaling = CASES[name]
    rope = {"rope_theta": theta, "rope_type": "default"} | scaling
    torch.manual_seed(0)
    reference = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**COMMON, **fields, rope_parameters=rope)
    ).eval()
    for parameter in reference.parameters():  # norms of 1 and biases of 0 would hide mistakes
        parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
    heads = fields["num_attention_heads"]
    config = ModelConfig(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=fields["num_key_value_heads"],
        head_dim=fields.get("head_dim", 24 // heads),
        rope_theta=theta,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16) if scaling else RopeScaling(),
        rms_norm_eps=1e-5,
        qk_norm=family == "Qwen3",
        attention_bias=family == "Qwen2",
        tie_word_embeddings=fields["tie_word_embeddings"],
    )
    return reference, config, *load(config, reference.state_dict())


def load(config, tensors):
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(1)), nnx.Param)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    pure = nnx.to_pure_dict(params)
    pure["embedding"] = arrays["model.embed_tokens.weight"]
    pure["norm"]["scale"] = arrays["model.norm.weight"]
    if not config.tie_word_embeddings:
        pure["head"] = arrays["lm_head.weight"].T
    for theirs, ours in LAYER.items():
        for suffix, leaf in (("", ""), (".weight", ".kernel"), (".bias", ".bias")):
            name = f"model.layers.{{}}.{theirs}{suffix}"
            if name.format(0) not in arrays:
                continue
            stacked = np.stack([arrays[name.format(i)] for i in range(config.num_layers)])
            *path, last = (ours + leaf).split(".")
            node = pure["layers"]
            for key in path:
                node = node[key]
            assert last in node, (theirs, last)
            node[last] = stacked.swapaxes(-1, -2) if leaf == ".kernel" else stacked
    nnx.replace_by_pure_dict(params, jax.tree.map(jnp.asarray, pure))
    return graphdef, params


def forward(graphdef, params, tokens, positions, segment_ids):
    model = nnx.merge(graphdef, params)
    return model.logits(model.hidden(tokens, positions, segment_ids))


@pytest.mark.parametrize("name", sorted(CASES))
def test_logits_and_gradients_equal_transformers(name):
    reference, config, graphdef, params = pair(name)
    tokens, mask, positions, segments = tiny.left_padded([9, 5], 9, 31)
    inputs = {
        "input_ids": torch.tensor(tokens, dtype=torch.long),
        "attention_mask": torch.tensor(mask, dtype=torch.long),
        "position_ids": torch.tensor(positions, dtype=torch.long),
    }
    theirs = reference(**inputs).logits
    ours = forward(graphdef, params, tokens, positions, segments)
    np.testing.assert_allclose(np.asarray(ours)[mask], theirs.detach().numpy()[mask], atol=1e-4)

    def loss(p):
        return jnp.mean(jnp.where(mask[..., None], jnp.tanh(forward(graphdef, p, tokens, positions, segments)), 0.0))

    gradient = nnx.to_pure_dict(jax.grad(loss)(params))
    torch.mean(torch.tanh(theirs) * inputs["attention_mask"][..., None]).backward()
    expected = reference.model.layers[1].self_attn.k_proj.weight.grad.numpy().T
    got = np.asarray(gradient["layers"]["attention"]["key"]["kernel"][1])
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 100.0},
        {"rms_norm_eps": 0.1},
        {"qk_norm": False},
        {"rope_scaling": RopeScaling("linear", 2.0)},
        {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 16)},
    ],
    ids=lambda c: next(iter(c)),
)
def test_every_field_reaches_the_computation(change):
    config, graphdef, params = tiny.decoder()
    tokens, _, positions, segments = tiny.left_padded([12], 12, 19)
    other, _ = nnx.split(Decoder(dataclasses.replace(config, **change), rngs=nnx.Rngs(0)), nnx.Param)
    if "qk_norm" in change:
        pure = nnx.to_pure_dict(params)
        for norm in ("query_norm", "key_norm"):
            pure["layers"]["attention"].pop(norm)
        other, changed = nnx.split(Decoder(dataclasses.replace(config, **change), rngs=nnx.Rngs(0)), nnx.Param)
        nnx.replace_by_pure_dict(changed, pure)
    else:
        changed = params
    a = forward(graphdef, params, tokens, positions, segments)
    b = forward(other, changed, tokens, positions, segments)
    assert np.abs(a - b).max() > 1e-3


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_and_unrolling_change_nothing(remat):
    config, graphdef, params = tiny.decoder()
    tokens, _, positions, segments = tiny.left_padded([7], 7, 19)
    other, _ = nnx.split(Decoder(dataclasses.replace(config, remat=remat, scan_unroll=2), rngs=nnx.Rngs(0)), nnx.Param)
    loss = lambda g: lambda p: jnp.sum(forward(g, p, tokens, positions, segments) ** 2)  # noqa: E731
    a, b = jax.grad(loss(graphdef))(params), jax.grad(loss(other))(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), a, b)


def test_decode_in_pieces_with_and_without_per_row_slots_equals_the_whole_forward():
    config, graphdef, params = tiny.decoder()
    tokens, mask, positions, segments = tiny.left_padded([10, 6, 1], 10, 19)
    whole = nnx.merge(graphdef, params).hidden(tokens, positions, segments)
    layers = unstack_layers(params)

    @jax.jit
    def pieces(params, layers):
        model, cache, hidden = nnx.merge(graphdef, params), caches.init_cache(config, 3, 10), []
        for start, end in ((0, 6), (6, 7), (7, 8), (8, 10)):
            slots = jnp.full(3, start) if start == 7 else jnp.int32(start)
            part = slice(start, end)
            h, cache = model.decode(tokens[:, part], positions[:, part], cache, slots, mask[:, part], layers=layers)
            cache = caches.grow(cache, 12) if end == 6 else cache
            hidden.append(h)
        return jnp.concatenate(hidden, axis=1)

    np.testing.assert_allclose(np.asarray(pieces(params, layers))[mask], np.asarray(whole)[mask], atol=1e-5)


def test_left_padding_changes_nothing():
    config, graphdef, params = tiny.decoder()
    tokens, _, positions, segments = tiny.left_padded([6], 6, 19)
    alone = forward(graphdef, params, tokens, positions, segments)
    pad = [(0, 0), (3, 0)]
    padded = forward(graphdef, params, np.pad(tokens, pad), np.pad(positions, pad), np.pad(segments, pad))
    np.testing.assert_allclose(padded[:, 3:], alone, atol=1e-5)
    assert np.isfinite(padded).all()


def test_segments_of_a_packed_row_do_not_see_each_other():
    config, graphdef, params = tiny.decoder()
    tokens, _, positions, segments = tiny.left_padded([6], 6, 19)
    alone = forward(graphdef, params, tokens, positions, segments)
    other = np.full((1, 4), 5, np.int32)
    packed = forward(
        graphdef,
        params,
        np.concatenate([other, tokens], 1),
        np.concatenate([np.arange(4)[None], positions], 1),
        np.concatenate([np.ones_like(other), 2 * segments], 1),
    )
    np.testing.assert_allclose(packed[:, 4:], alone, atol=1e-5)


def test_bad_architectures_are_named():
    with pytest.raises(ValueError, match="model.num_kv_heads is 3; it must be a divisor of num_heads = 4"):
        ModelConfig(num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="model.head_dim is 7"):
        ModelConfig(head_dim=7)
