"""How far an emulating sampler's log-probs are from the trainer's on the tokens that it drew."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm import processes
from jaxrl_llm.experience import batches
from jaxrl_llm.learning.mismatch import Mismatch
from jaxrl_llm.learning.step import Forward
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.ops.fp8 import Fp8Sites
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.rollout.slots import SamplingConfig

SITES = ("logits", "weights", "activations", "kv_cache")
FORMATS = ("e4m3", "e5m2")


def cases() -> dict[str, Fp8Sites]:
    """Emulation off, each site alone in each format, weights with block scales, and everything at once."""
    table = {"off": Fp8Sites()}
    for site in SITES:
        table |= {f"{site} {fmt}": Fp8Sites(**{site: fmt}) for fmt in FORMATS}
    table |= {f"weights {fmt}, 128 x 128 blocks": Fp8Sites(weights=fmt, weight_scale="block") for fmt in FORMATS}
    return table | {f"all {fmt}": Fp8Sites(**dict.fromkeys(SITES, fmt)) for fmt in FORMATS}


def measure(
    graphdef: nnx.GraphDef,
    model: ModelConfig,
    params: Any,
    config: SamplingConfig,
    sites: Fp8Sites,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    group_size: int,
) -> Mismatch:
    """Samples with `sites` emulated and scores the same tokens with the trainer's forward, which emulates nothing.

    Args:
      graphdef: the decoder without parameters.
      model: its architecture.
      params: its parameters.
      config: how to sample; `fp8` and `choice.fp8` are replaced.
      sites: where FP8 is emulated.
      prompts: token ids.
      key: of the rollout.
      group_size: samples of each prompt.
    """
    choice = dataclasses.replace(config.choice, fp8=sites.logits)
    config = dataclasses.replace(config, fp8=sites, choice=choice)
    rollout = Sampler(graphdef, model, config)(params, prompts, key, group_size=group_size)
    batch = batches.from_rollout(rollout, jnp.zeros(len(rollout.response_tokens)))
    forward = Forward(graphdef, model.vocab_size, config.choice.temperature or 1.0)
    logprobs = processes.fetch(jax.jit(forward)(params, batch).logprobs)
    x = (logprobs - batch.behavior_logprobs).astype(np.float64)[rollout.response_mask]
    return Mismatch.of(x)
