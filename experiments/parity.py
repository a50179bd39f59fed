"""How far our decoder is from transformers', for every architecture: the table of docs/models.md.

    python experiments/parity.py

Small random models are saved by transformers, loaded here, and asked for logits and for the gradient of a loss; then they are
exported and loaded by transformers again. Needs torch. Takes about a minute on a CPU.
"""

import dataclasses
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.api import command_line
from jaxrl_llm.hub import names, pretrained
from jaxrl_llm.models.abstract import abstract
from jaxrl_llm.models.decoder import Decoder

COMMON = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
QWEN35 = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}


def _heads(heads: int, kv_heads: int, **fields: Any) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, **fields}


# Name -> (prefix of transformers' classes, fields, rotary parameters).
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama, tied": ("Llama", _heads(3, 3, tie_word_embeddings=True), {}),
    "Llama 3 (scaled rotary, GQA)": ("Llama", _heads(4, 2, tie_word_embeddings=False), LLAMA3),
    "Qwen2": ("Qwen2", _heads(4, 2, tie_word_embeddings=False), {"rope_theta": 1e6}),
    "Qwen3 (3 heads on 1)": ("Qwen3", _heads(3, 1, head_dim=10, tie_word_embeddings=True), {}),
    "Qwen3-MoE": (
        "Qwen3Moe",
        _heads(4, 2, head_dim=8, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=8, norm_topk_prob=True),
        {},
    ),
    "Qwen3.5": (
        "Qwen3_5",
        _heads(4, 2, head_dim=8, tie_word_embeddings=True, **QWEN35),
        {"partial_rotary_factor": 0.5},
    ),
    "Qwen3.5-MoE": (
        "Qwen3_5Moe",
        _heads(
            4,
            2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=12,
            **QWEN35,
        ),
        {"partial_rotary_factor": 0.25},
    ),
}


@dataclasses.dataclass(frozen=True)
class Parity:
    """What the comparison found.

    Attributes:
      logits: largest absolute difference of a logit.
      gradients: largest difference of a gradient's entry, relative to the largest entry of its tensor; worst tensor.
      exported: largest absolute difference between transformers' logits before and after a round trip through ours.
    """

    logits: float
    gradients: float
    exported: float


def reference(name: str, path: pathlib.Path) -> Any:
    """The random transformers model of a case, saved under `path`."""
    import torch
    import transformers

    family, fields, rope = CASES[name]
    kind = f"{family}TextConfig" if family.startswith("Qwen3_5") else f"{family}Config"
    rope = {"rope_theta": 5000.0, "rope_type": "default"} | rope
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(COMMON | fields), rope_parameters=rope)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # norms of 1 and biases of 0 would hide mistakes
        parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model


def inputs(vocab: int, lengths: tuple[int, ...] = (9, 5)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Left-padded random tokens int32 [B, L], their mask and positions."""
    width = max(lengths)
    mask = np.arange(width) >= width - np.asarray(lengths)[:, None]
    tokens = np.where(mask, np.random.default_rng(0).integers(3, vocab, mask.shape), 0).astype(np.int32)
    return tokens, mask, np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int32)


def their_logits(model: Any, tokens: np.ndarray, mask: np.ndarray, positions: np.ndarray) -> Any:
    """Logits [B, L, V] of a transformers model, as a torch tensor."""
    import torch

    fields = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    return model(**{name: torch.tensor(array, dtype=torch.long) for name, array in fields.items()}).logits


def compare(name: str, folder: pathlib.Path) -> Parity:
    """Measures one case, in float32.

    Args:
      name: of `CASES`.
      folder: where checkpoints may be written.
    """
    import torch
    import transformers

    model = reference(name, folder / "theirs")
    tokens, mask, positions = inputs(COMMON["vocab_size"])
    theirs = their_logits(model, tokens, mask, positions)
    torch.mean(torch.tanh(theirs) * torch.tensor(mask)[..., None]).backward()

    path = pretrained.find(str(folder / "theirs"))
    config = pretrained.read_config(path)
    params = pretrained.load(path, config)
    graphdef = abstract(Decoder, config)[0]

    def loss(params):
        decoder = nnx.merge(graphdef, params)
        logits = decoder.logits(decoder.hidden(tokens, positions, mask.astype(np.int32)))
        return jnp.mean(jnp.where(mask[..., None], jnp.tanh(logits), 0.0)), logits

    gradient, ours = jax.jit(jax.grad(loss, has_aux=True))(params)

    pretrained.save(folder / "ours", params, config, pretrained.transformers_config(path), None, dtype="float32")
    back = getattr(transformers, type(model).__name__).from_pretrained(folder / "ours").eval()
    returned = their_logits(back, tokens, mask, positions)
    return Parity(
        logits=_largest(np.asarray(ours)[mask] - theirs.detach().numpy()[mask]),
        gradients=_gradient_difference(config, gradient, model),
        exported=_largest((returned - theirs).detach().numpy()[mask]),
    )


def _gradient_difference(config: Any, gradient: Any, model: Any) -> float:
    """Worst tensor's largest difference relative to its largest entry, in the checkpoint's layout."""
    found = {
        name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
        for name, p in model.named_parameters()
    }
    flat = pretrained.flatten(jax.device_get(gradient))
    worst = 0.0
    for name, tensor in names.tensors(config, flat).items():
        ours = np.asarray(tensor.rule.join(config, *(flat[path][tensor.index] for path in tensor.paths)))
        expert = name.partition(".experts.")[2]
        if expert:  # transformers keeps the experts of a layer in one tensor, gate and up together
            number, kind = int(expert.split(".")[0]), expert.split(".")[1]
            stack = found[
                name.partition(".experts.")[0]
                + (".experts.down_proj" if kind == "down_proj" else ".experts.gate_up_proj")
            ]
            theirs = stack[number]
            theirs = theirs if kind == "down_proj" else np.split(theirs, 2)[kind == "up_proj"]
            scale = np.abs(stack).max()
        else:
            theirs, scale = found[name], np.abs(found[name]).max()
        worst = max(worst, _largest(ours - theirs) / max(scale, 1e-30))
    return worst


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max())


def main():
    print("| architecture | max abs logit difference | max relative gradient difference | logits after export |")
    print("| --- | --- | --- | --- |")
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            parity = compare(name, pathlib.Path(folder))
        print(f"| {name} | {parity.logits:.1e} | {parity.gradients:.1e} | {parity.exported:.1e} |")


if __name__ == "__main__":
    command_line.run(main)
