"""Where each of our parameters is kept in a Hugging Face checkpoint: one table, read in both directions.

A checkpoint has a tensor for every layer and expert, matrices as [out, in]; our parameters are stacked over layers (and
experts), kernels as [in, out]. A `Rule` is one line of the table: a tensor's name, the parameters that it holds, and how
to take them out and put them back. A rule counts wherever a block has all its parameters, and the first that fits a
parameter wins, so a new architecture adds lines for what is new in it. A `Layout` is what checkpoints of one and the same
model differ in: where the decoder stands in a larger model, and whether a layer's experts lie in one tensor.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
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
    """A matrix kept as [out, in], or a stack of them."""
    return Rule(theirs, (ours,), lambda config, x: (x.swapaxes(-1, -2),), lambda config, x: x.swapaxes(-1, -2))


def _split_query_and_gate(config: ModelConfig, x: Any) -> Parts:
    # Each head's query, then its gate.
    halves = x.reshape(config.num_heads, 2, config.head_dim, -1)
    return tuple(halves[:, i].reshape(config.num_heads * config.head_dim, -1).swapaxes(0, 1) for i in range(2))


def _join_query_and_gate(config: ModelConfig, *parts: Any) -> Any:
    heads = [x.swapaxes(0, 1).reshape(config.num_heads, 1, config.head_dim, -1) for x in parts]
    return jnp.concatenate(heads, axis=1).reshape(2 * config.num_heads * config.head_dim, -1)


def _split_gate_and_up(config: ModelConfig, x: Any) -> Parts:
    # [experts, gate's rows and then up's, D]
    size = config.moe.intermediate_size
    return x[:, :size].swapaxes(1, 2), x[:, size:].swapaxes(1, 2)


def _join_gate_and_up(config: ModelConfig, gate: Any, up: Any) -> Any:
    return jnp.concatenate([gate, up], axis=-1).swapaxes(1, 2)


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
    matrix("mlp.shared_expert.gate_proj.weight", "feed_forward.shared.gate.kernel"),
    matrix("mlp.shared_expert.up_proj.weight", "feed_forward.shared.up.kernel"),
    matrix("mlp.shared_expert.down_proj.weight", "feed_forward.shared.down.kernel"),
    matrix("mlp.shared_expert_gate.weight", "feed_forward.shared_gate.kernel"),
)
EXPERTS = (
    matrix("mlp.experts.{expert}.gate_proj.weight", "feed_forward.experts.gate.kernel"),
    matrix("mlp.experts.{expert}.up_proj.weight", "feed_forward.experts.up.kernel"),
    matrix("mlp.experts.{expert}.down_proj.weight", "feed_forward.experts.down.kernel"),
)
FUSED_EXPERTS = (
    Rule(
        "mlp.experts.gate_up_proj",
        ("feed_forward.experts.gate.kernel", "feed_forward.experts.up.kernel"),
        _split_gate_and_up,
        _join_gate_and_up,
    ),
    matrix("mlp.experts.down_proj", "feed_forward.experts.down.kernel"),
)
LAYER = ATTENTION + DELTA_NET + FEED_FORWARD + MOE
EMBEDDING, HEAD, SCORE = "embed_tokens.weight", "lm_head.weight", "score.weight"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a checkpoint names and groups its tensors.

    Attributes:
      prefix: of the decoder's tensors; the heads have none.
      fused_experts: a layer's experts are one tensor for gate and up and one for down; else each has its own three.
    """

    prefix: str = "model."
    fused_experts: bool = False

    @classmethod
    def of(cls, names: Iterable[str]) -> "Layout":
        """The layout of a checkpoint with tensors of these names."""
        names, multimodal = list(names), "model.language_model."
        prefix = multimodal if any(name.startswith(multimodal) for name in names) else cls.prefix
        fused = any(name.startswith(prefix) and name.endswith(FUSED_EXPERTS[0].theirs) for name in names)
        return cls(prefix, fused)

    @property
    def embedding(self) -> str:
        """Name of the embedding."""
        return self.prefix + EMBEDDING


PLAIN = Layout()  # transformers' own of a language model


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


def tensors(config: ModelConfig, params: Mapping[Path, Any], layout: Layout = PLAIN) -> dict[str, Tensor]:
    """Name -> `Tensor` for every tensor that a checkpoint of the model holds, in the order of the layers.

    Args:
      config: architecture.
      params: path -> array or shape, all parameters of a `Decoder` or of a `ScalarModel`.
      layout: of the checkpoint.

    Raises:
      ValueError: a parameter without a rule; names it.
    """
    found: dict[str, Tensor] = {}
    used: set[Path] = set()
    trunk = ("trunk",) if ("trunk", "embedding") in params else ()

    def add(rules: tuple[Rule, ...], inside: Path, prefix: str, layers: list[int] | None = None) -> None:
        for rule in rules:
            paths = tuple((*inside, *name.split(".")) for name in rule.ours)
            if not all(path in params and path not in used for path in paths):
                continue
            used.update(paths)
            apart = "{expert}" in rule.theirs
            lead = (layers is not None) + apart  # axes that a checkpoint takes apart
            parts = [jax.ShapeDtypeStruct(params[p].shape[lead:], params[p].dtype) for p in paths]
            join = lambda *parts, rule=rule: rule.join(config, *parts)  # noqa: E731
            shape = jax.eval_shape(join, *parts).shape
            for row, layer in enumerate([None] if layers is None else layers):
                for expert in range(config.moe.num_experts) if apart else [None]:
                    name = prefix.format(layer=layer) + rule.theirs.format(expert=expert)
                    found[name] = Tensor(shape, paths, (row, expert)[:lead], rule)

    add((same(EMBEDDING, "embedding"),), trunk, layout.prefix)
    for i in range(config.period):
        inside = (*trunk, "layers") if config.period == 1 else (*trunk, "layers", f"block{i}")
        rules = LAYER + (FUSED_EXPERTS if layout.fused_experts else EXPERTS)
        add(rules, inside, layout.prefix + "layers.{layer}.", list(range(i, config.num_layers, config.period)))
    add((same("norm.weight", "norm.scale"),), trunk, layout.prefix)
    add((matrix(HEAD, "head"), matrix(SCORE, "score.kernel")), (), "")
    lost = sorted(".".join(path) for path in params if path not in used)
    if lost:
        raise ValueError(f"parameter {lost[0]} has no name in a Hugging Face checkpoint (models/names.py)")
    return found
