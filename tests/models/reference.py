"""Copies the weights of a transformers model into ours, and its gradients into our layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.models.decoder import Decoder
from tests import tiny

torch = pytest.importorskip("torch")

# Our parameter within a block -> tensor of the transformers layer; matrices are stored transposed there.
ATTENTION = {
    "attention_norm.scale": "input_layernorm.weight",
    "feed_forward_norm.scale": "post_attention_layernorm.weight",
    "attention.query.kernel": "self_attn.q_proj.weight",
    "attention.key.kernel": "self_attn.k_proj.weight",
    "attention.value.kernel": "self_attn.v_proj.weight",
    "attention.out.kernel": "self_attn.o_proj.weight",
    "attention.query_norm.scale": "self_attn.q_norm.weight",
    "attention.key_norm.scale": "self_attn.k_norm.weight",
}
FEED_FORWARD = {
    "feed_forward.gate.kernel": "mlp.gate_proj.weight",
    "feed_forward.up.kernel": "mlp.up_proj.weight",
    "feed_forward.down.kernel": "mlp.down_proj.weight",
}
MOE = {
    "feed_forward.router": "mlp.gate.weight",
    "feed_forward.experts.gate.kernel": "mlp.experts.gate_up_proj",
    "feed_forward.experts.up.kernel": "mlp.experts.gate_up_proj",
    "feed_forward.experts.down.kernel": "mlp.experts.down_proj",
}
SHARED = {
    "feed_forward.shared.gate.kernel": "mlp.shared_expert.gate_proj.weight",
    "feed_forward.shared.up.kernel": "mlp.shared_expert.up_proj.weight",
    "feed_forward.shared.down.kernel": "mlp.shared_expert.down_proj.weight",
    "feed_forward.shared_gate.kernel": "mlp.shared_expert_gate.weight",
}
DELTA_NET = {
    "delta_net.qkv.kernel": "linear_attn.in_proj_qkv.weight",
    "delta_net.output_gate.kernel": "linear_attn.in_proj_z.weight",
    "delta_net.beta.kernel": "linear_attn.in_proj_b.weight",
    "delta_net.decay.kernel": "linear_attn.in_proj_a.weight",
    "delta_net.conv": "linear_attn.conv1d.weight",
    "delta_net.log_rate": "linear_attn.A_log",
    "delta_net.decay_bias": "linear_attn.dt_bias",
    "delta_net.norm.scale": "linear_attn.norm.weight",
    "delta_net.out.kernel": "linear_attn.out_proj.weight",
    "attention.output_gate.kernel": "self_attn.q_proj.weight",
}
LAYER = ATTENTION | FEED_FORWARD | MOE | SHARED | DELTA_NET


def params_like(config, tensors):
    """(graphdef, parameters) from a transformers state dict, or a tree of gradients from a dict of gradients.

    Raises KeyError where one of our parameters has no counterpart, AssertionError where a tensor is left over.
    """
    arrays, used = {name: np.asarray(tensor) for name, tensor in tensors.items()}, set()
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(1)), nnx.Param)

    def take(name):
        used.add(name)
        return arrays[name]

    def find(path):
        path = [str(p.key) for p in path if isinstance(p, jax.tree_util.DictKey)]
        if path[0] != "layers":
            name = {
                "embedding": "model.embed_tokens.weight",
                "norm": "model.norm.weight",
                "head": "lm_head.weight",
            }[path[0]]
            return take(name).T if path[0] == "head" else take(name)
        block = int(path[1][5:]) if path[1].startswith("block") else 0
        ours = ".".join(path[1 + path[1].startswith("block") :])
        layers = range(block, config.num_layers, config.period)
        return np.stack([_convert(config, ours, take(f"model.layers.{i}.{LAYER[ours]}")) for i in layers])

    pure = jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(find(path)), nnx.to_pure_dict(params))
    left = set(arrays) - used - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    assert not left, left
    nnx.replace_by_pure_dict(params, pure)
    return graphdef, params


def _convert(config, ours, tensor):
    if ours == "delta_net.conv":
        return tensor[:, 0].T
    if config.attention_gate and ours in ("attention.query.kernel", "attention.output_gate.kernel"):
        halves = tensor.reshape(config.num_heads, 2, config.head_dim, -1)  # each head's query, then its gate
        tensor = halves[:, int("gate" in ours)].reshape(config.num_heads * config.head_dim, -1)
    if "experts" in ours and "down" not in ours:
        tensor = np.split(tensor, 2, axis=1)[0 if ".gate." in ours else 1]
    matrix = ours.endswith("kernel") or ours.endswith("router")
    return tensor.swapaxes(-1, -2) if matrix else tensor


def compare(theirs, config, graphdef, params):
    """Asserts that logits on left-padded rows agree to 1e-4, and every gradient of a loss to 1e-4 of its largest entry."""
    tokens, mask, positions, segments = tiny.left_padded([9, 5], 9, config.vocab_size)
    inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    logits = theirs(**{name: torch.tensor(array, dtype=torch.long) for name, array in inputs.items()}).logits
    torch.mean(torch.tanh(logits) * torch.tensor(mask)[..., None]).backward()

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params):
        model = nnx.merge(graphdef, params)
        ours = model.logits(model.hidden(tokens, positions, segments))
        return jnp.mean(jnp.where(mask[..., None], jnp.tanh(ours), 0.0)), ours

    got, ours = gradient(params)
    np.testing.assert_allclose(np.asarray(ours)[mask], logits.detach().numpy()[mask], atol=1e-4)
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in theirs.named_parameters(remove_duplicate=False)
    }
    _, expected = params_like(config, grads)

    def close(path, a, b):
        assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max(), jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(close, got, expected)
