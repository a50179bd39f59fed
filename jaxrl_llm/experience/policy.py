"""The policy of a run: architecture, parameters and tokenizer."""

import dataclasses
import pathlib
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jaxrl_llm import schema
from jaxrl_llm.config import Model, RunConfig, check_model
from jaxrl_llm.hub import pretrained
from jaxrl_llm.models.abstract import abstract
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.parallel import sharding
from jaxrl_llm.tasks import Task

# Fields of the architecture that are about speed and so remain open where a checkpoint decides the others.
OPEN = ("scan_unroll",)


@dataclasses.dataclass(frozen=True)
class _NoTask:
    """For a policy outside any run: the tokenizer is the checkpoint's."""

    name: str = "none"
    tokenizer: None = None


NO_TASK: Any = _NoTask()


@dataclasses.dataclass(frozen=True)
class Policy:
    """What the rest of a run needs of its model.

    Attributes:
      config: architecture.
      graphdef: the model without parameters.
      params: parameters, on the mesh; shapes only from `describe`.
      tokenizer: the task's own or the checkpoint's.
      stop_ids: ids that end a response.
      pad_id: filler.
      source: the checkpoint that the parameters come from, or None.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    pad_id: int
    source: pathlib.Path | None = None


def create(run: RunConfig, task: Task, mesh: Mesh) -> Policy:
    """Parameters of `run.model.source`, or random ones of `run.model.architecture`, sharded as they are made.

    Raises:
      ValueError: see `describe`; and a checkpoint whose tensors do not fit, see `pretrained.load`.
    """
    policy = describe(run, task)
    if policy.source is not None:
        params = pretrained.load(policy.source, policy.config, lambda tree: sharding.shardings(tree, mesh))
        return dataclasses.replace(policy, params=params)

    def init():
        return nnx.split(Decoder(policy.config, rngs=nnx.Rngs(run.seed)), nnx.Param)[1]

    return dataclasses.replace(policy, params=sharding.create(init, mesh))


def describe(run: RunConfig, task: Task) -> Policy:
    """Everything about the policy but its parameters, of which it gives the shapes; reads no tensor, compiles nothing.

    Raises:
      ValueError: a checkpoint that is not there or not supported, an architecture field that does not fit, a task and a
        checkpoint that do not go together; names the field.
    """
    config, tokenizer, source = describe_model(run.model, task)
    stop_ids = (tokenizer.eos_token_id,) if source is None else pretrained.stop_ids(source, tokenizer)
    check_vocabulary(config, tokenizer, source, stop_ids)
    check_model(run, config)
    graphdef, params = abstract(Decoder, config)
    # The masks come from the sampler, so an end token may well serve as filler.
    pad_id = stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return Policy(config, graphdef, params, tokenizer, stop_ids, pad_id, source)


def describe_model(model: Model, task: Task) -> tuple[ModelConfig, Any, pathlib.Path | None]:
    """Architecture, tokenizer and checkpoint (or None) of a configured model for a task; reads no tensor.

    Raises:
      ValueError: as `describe`.
    """
    fields = model.runtime
    tokenizer = task.tokenizer
    if not model.source:
        if tokenizer is None:
            raise ValueError(
                f"config.model.source is empty; task {task.name!r} takes its tokenizer from the checkpoint named there"
            )
        fields = {"vocab_size": _size(tokenizer), **model.architecture, **fields}
        return schema.read(ModelConfig, fields, "config.model.architecture"), tokenizer, None
    for name, value in model.architecture.items():
        right = "left out: config.model.source decides it"
        schema.require(name in OPEN, f"config.model.architecture.{name}", value, right)
    source = pretrained.find(model.source)
    config = pretrained.read_config(source, **fields, **model.architecture)
    if tokenizer is None:
        return config, pretrained.tokenizer(source), source
    right = f"a checkpoint with the vocabulary of the task's own tokenizer, {_size(tokenizer)} ids"
    schema.require(_size(tokenizer) == config.vocab_size, "config.model.source", model.source, right)
    return config, tokenizer, source


def check_vocabulary(
    config: ModelConfig, tokenizer: Any, source: pathlib.Path | None, ids: tuple[int, ...] = ()
) -> None:
    """Checks that a model has an embedding for every id of its tokenizer, and for `ids`."""
    size = max([_size(tokenizer), *(1 + i for i in ids)])
    field = "config.model.architecture.vocab_size" if source is None else f"vocab_size of {source}"
    schema.require(config.vocab_size >= size, field, config.vocab_size, f"at least the tokenizer's {size}")


def _size(tokenizer: Any) -> int:
    """Ids of a tokenizer, those that were added to its vocabulary included."""
    return len(tokenizer) if hasattr(tokenizer, "__len__") else tokenizer.vocab_size
