"""The policy of a run: architecture, parameters and tokenizer, made from scratch or loaded."""

import dataclasses
import pathlib
from typing import Any

import jax
from flax import nnx

from jaxrl_llm import schema, tasks
from jaxrl_llm.models import hf
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.training import sharding
from jaxrl_llm.training.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Policy:
    """What the rest of a run needs of its model.

    Attributes:
      config: architecture.
      graphdef: the model without parameters.
      shardings: tree of NamedSharding that matches the parameters.
      tokenizer: the embedded character tokenizer or a transformers one.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    shardings: Any
    tokenizer: Any
