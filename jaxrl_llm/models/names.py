"""Where each of our parameters is kept in a Hugging Face checkpoint: one table, read in both directions.

A checkpoint has a tensor for every layer and expert, matrices as [out, in]; our parameters are stacked over layers (and
experts), kernels as [in, out]. A `Rule` is one line of the table: a tensor's name, the parameters that it holds, and how
to take them out and put them back. A rule counts wherever a block has all its parameters, and the first that fits a
parameter wins, so a new architecture adds lines for what is new in it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig

Path = tuple[str, ...]
Parts = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of tensor.

    Attributes:
      theirs: name within the layer; "{expert}" stands for a number.
      ours: the parameters in it, dotted paths within the block.
      split: (config, tensor) -> the parameters' values, for one layer (and expert).
      join: (config, *values) -> the tensor; the inverse.
    """

    theirs: str
    ours: tuple[str, ...]
    split: Callable[[ModelConfig, Any], Parts]
    join: Callable[..., Any]


def same(theirs: str, ours: str) -> Rule:
    """A tensor that is the parameter."""
    return Rule(theirs, (ours,), lambda config, x: (x,), lambda config, x: x)


def matrix(theirs: str, ours: str) -> Rule:
    """A matrix kept as [out, in]."""
    return Rule(theirs, (ours,), lambda config, x: (x.swapaxes(0, 1),), lambda config, x: x.swapaxes(0, 1))


def _split_query_and_gate(config: ModelConfig, x: Any) -> Parts:
    # Each head's query, then its gate.
    halves = x.reshape(config.num_heads, 2, config.head_dim, -1)
    return tuple(halves[:, i].reshape(config.num_heads * config.head_dim, -1).swapaxes(0, 1) for i in range(2))


def _join_query_and_gate(config: ModelConfig, *parts: Any) -> Any:
    heads = [x.swapaxes(0, 1).reshape(config.num_heads, 1, config.head_dim, -1) for x in parts]
    return jnp.concatenate(heads, axis=1).reshape(2 * config.num_heads * config.head_dim, -1)


ATTENTION = (
    same("input_layernorm.weight", "attention_norm.scale"),
    same("post_attention_layernorm.weight", "feed_forward_norm.scale"),
    Rule(
        "self_attn.q_proj.weight",
        ("attention.query.kernel", "attention.output_gate.kernel"),
        _split_query_and_gate,
        _join_query_and_gate,
    ),
    matrix("self_attn.q_proj.weight", "attention.query.kernel"),
    matrix("self_attn.k_proj.weight", "attention.key.kernel"),
    matrix("self_attn.v_proj.weight", "attention.value.kernel"),
    matrix("self_attn.o_proj.weight", "attention.out.kernel"),
    same("self_attn.q_proj.bias", "attention.query.bias"),
    same("self_attn.k_proj.bias", "attention.key.bias"),
    same("self_attn.v_proj.bias", "attention.value.bias"),
    same("self_attn.q_norm.weight", "attention.query_norm.scale"),
    same("self_attn.k_norm.weight", "attention.key_norm.scale"),
)
DELTA_NET = (
    matrix("linear_attn.in_proj_qkv.weight", "delta_net.qkv.kernel"),
    matrix("linear_attn.in_proj_z.weight", "delta_net.output_gate.kernel"),
    matrix("linear_attn.in_proj_b.weight", "delta_net.beta.kernel"),
    matrix("linear_attn.in_proj_a.weight", "delta_net.decay.kernel"),
    Rule("linear_attn.conv1d.weight", ("delta_net.conv",), lambda c, x: (x[:, 0].T,), lambda c, x: x.T[:, None]),
    same("linear_attn.A_log", "delta_net.log_rate"),
    same("linear_attn.dt_bias", "delta_net.decay_bias"),
    same("linear_attn.norm.weight", "delta_net.norm.scale"),
    matrix("linear_attn.out_proj.weight", "delta_net.out.kernel"),
)
FEED_FORWARD = (
    matrix("mlp.gate_proj.weight", "feed_forward.gate.kernel"),
    matrix("mlp.up_proj.weight", "feed_forward.up.kernel"),
    matrix("mlp.down_proj.weight", "feed_forward.down.kernel"),
)
MOE = (
    matrix("mlp.gate.weight", "feed_forward.router"),
    matrix("mlp.experts.{expert}.gate_proj.weight", "feed_forward.experts.gate.kernel"),
    matrix("mlp.experts.{expert}.up_proj.weight", "feed_forward.experts.up.kernel"),
    matrix("mlp.experts.{expert}.down_proj.weight", "feed_forward.experts.down.kernel"),
    matrix("mlp.shared_expert.gate_proj.weight", "feed_forward.shared.gate.kernel"),
    matrix("mlp.shared_expert.up_proj.weight", "feed_forward.shared.up.kernel"),
    matrix("mlp.shared_expert.down_proj.weight", "feed_forward.shared.down.kernel"),
    matrix("mlp.shared_expert_gate.weight", "feed_forward.shared_gate.kernel"),
)
LAYER = ATTENTION + DELTA_NET + FEED_FORWARD + MOE
OUTSIDE = (
    same("model.embed_tokens.weight", "embedding"),
    same("model.norm.weight", "norm.scale"),
    matrix("lm_head.weight", "head"),
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    Attributes:
      shape: in the checkpoint.
      paths: the parameters in it.
      index: its place on their leading axes (layer within the stack, expert).
      rule: how to convert.
    """

    shape: tuple[int, ...]
    paths: tuple[Path, ...]
    index: tuple[int, ...]
    rule: Rule


def tensors(config: ModelConfig, params: Mapping[Path, Any]) -> dict[str, Tensor]:
    """Name -> `Tensor` for every tensor that a checkpoint of the model holds, in the order of the layers.

    Args:
      config: architecture.
      params: path -> array or shape, all parameters of the decoder.

    Raises:
      ValueError: a parameter without a rule; names it.
    """
    found: dict[str, Tensor] = {}
    used: set[Path] = set()

    def add(rules: tuple[Rule, ...], inside: Path, prefix: str, layers: list[int]) -> None:
        for rule in rules:
            paths = tuple((*inside, *name.split(".")) for name in rule.ours)
            if not all(path in params and path not in used for path in paths):
                continue
            used.update(paths)
            lead = len(inside[:1]) + ("{expert}" in rule.theirs)  # axes that a checkpoint takes apart
            parts = [jax.ShapeDtypeStruct(params[p].shape[lead:], params[p].dtype) for p in paths]
            join = lambda *parts, rule=rule: rule.join(config, *parts)  # noqa: E731
            shape = jax.eval_shape(join, *parts).shape
            experts = range(config.moe.num_experts) if "{expert}" in rule.theirs else [None]
            for row, layer in enumerate(layers):
                for expert in experts:
                    index = () if not inside else (row,) if expert is None else (row, expert)
                    name = prefix.format(layer=layer) + rule.theirs.format(expert=expert)
                    found[name] = Tensor(shape, paths, index, rule)

    add(OUTSIDE[:1], (), "", [0])
    for i in range(config.period):
        inside = ("layers",) if config.period == 1 else ("layers", f"block{i}")
        add(LAYER, inside, "model.layers.{layer}.", list(range(i, config.num_layers, config.period)))
    add(OUTSIDE[1:], (), "", [0])
    lost = sorted(".".join(path) for path in params if path not in used)
    if lost:
        raise ValueError(f"parameter {lost[0]} has no name in a Hugging Face checkpoint (models/names.py)")
    return found
