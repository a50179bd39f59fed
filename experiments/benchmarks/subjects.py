"""The models that are measured, ours and the same in transformers, and the machine's rate on large matrices."""

import os
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.config import files as config_files
from jaxrl_llm.hub import hf_config, pretrained
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder

SIDE = 2048  # of the large matrices
SMOLLM2 = pathlib.Path(__file__).parents[2] / "configs" / "smollm2_arith.py"
QWEN3 = ModelConfig(
    vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=32
)
NAMES = ("qwen3", "smollm2")  # 4 layers, 256 wide, random; SmolLM2-135M-Instruct


def checkpoint() -> pathlib.Path:
    """Where SmolLM2 lies."""
    return pretrained.find(config_files.load(SMOLLM2).smollm2())


def create(name: str) -> tuple[ModelConfig, Any]:
    """Architecture and parameters of one of `NAMES`."""
    if name == "qwen3":
        return QWEN3, nnx.split(Decoder(QWEN3, rngs=nnx.Rngs(0)), nnx.Param)[1]
    path = checkpoint()
    model = pretrained.read_config(path)
    return model, pretrained.load(path, model)


def save(directory: pathlib.Path, model: ModelConfig, params: Any) -> None:
    """The same model as transformers reads it, in float32."""
    pretrained.save(directory, params, model, hf_config.to_transformers(model), None, dtype="float32")


def torch_model(model: ModelConfig, params: Any) -> Any:
    """The same model in transformers, on as many cores as XLA takes."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        save(pathlib.Path(directory) / "model", model, params)
        return transformers.AutoModelForCausalLM.from_pretrained(f"{directory}/model", dtype="float32")


def large_product() -> Any:
    """A call that multiplies two matrices of `SIDE` x `SIDE`, and its FLOPs."""
    square = jax.random.normal(jax.random.key(0), (SIDE, SIDE))
    product = jax.jit(jnp.matmul)
    return lambda: product(square, square), 2 * SIDE**3
