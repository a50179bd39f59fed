"""Models without memory: what a program needs to know of one before, or instead of, its parameters."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxrl_llm.models.config import ModelConfig


def abstract(module: Callable[..., nnx.Module], config: ModelConfig) -> tuple[nnx.GraphDef, Any]:
    """The graph of `module(config, rngs=...)` and the shapes of its parameters; nothing is computed or allocated."""
    return nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))), nnx.Param)
