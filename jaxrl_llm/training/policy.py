"""The policy of a run: architecture, parameters and tokenizer."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxrl_llm import schema
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.tasks import Task
from jaxrl_llm.training import sharding
from jaxrl_llm.training.config import RunConfig, check_model


@dataclasses.dataclass(frozen=True)
class Policy:
    """What the rest of a run needs of its model.

    Attributes:
      config: architecture.
      graphdef: the model without parameters.
      params: parameters, on the mesh.
      tokenizer: the task's own or the checkpoint's.
      stop_ids: ids that end a response.
      pad_id: filler.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    pad_id: int


def create(run: RunConfig, task: Task, mesh: Mesh) -> Policy:
    """Random parameters of `run.model.architecture`, sharded as they are made.

    Raises:
      ValueError: an architecture field that does not fit; names it.
    """
    tokenizer = task.tokenizer
    if tokenizer is None:
        raise ValueError(f"task {task.name!r} takes its tokenizer from the policy's checkpoint, and there is none")
    fields = {"vocab_size": tokenizer.vocab_size, **run.model.architecture}
    fields |= {name: getattr(run.model, name) for name in ("dtype", "param_dtype", "remat")}
    config = schema.read(ModelConfig, fields, "config.model.architecture")
    schema.require(
        config.vocab_size >= tokenizer.vocab_size,
        "config.model.architecture.vocab_size",
        config.vocab_size,
        f"at least the tokenizer's {tokenizer.vocab_size}",
    )
    check_model(run, config)

    def init():
        return nnx.split(Decoder(config, rngs=nnx.Rngs(run.seed)), nnx.Param)[1]

    places = sharding.shardings(jax.eval_shape(init), mesh)
    params = jax.jit(init, out_shardings=places)()
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)[0]
    return Policy(config, graphdef, params, tokenizer, (tokenizer.eos_token_id,), tokenizer.pad_token_id)
