"""FP8 emulation of the sampler's weights: a pure function on the parameter tree, applied once per rollout.

The other sites live where the numbers are made: logits in `choice`, activations and the KV cache in the decoder.
"""

from typing import Any

import jax

from jaxrl_llm.ops.fp8 import Fp8Sites, fake_quant_weight


def quantize_weights(params: Any, sites: Fp8Sites) -> Any:
    """The parameters as an FP8 engine holds them: matrices of the linear layers rounded, all else (embedding, norms,
    biases, unembedding) untouched, as FP8 checkpoints leave them.

    Args:
      params: a decoder's parameters.
      sites: `weights` and `weight_scale` matter here.

    Returns:
      A tree of the same structure, shapes and dtypes. Gradients pass straight through.
    """
    if sites.weights == "off":
        return params

    def rounded(path, leaf):
        names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
        return fake_quant_weight(leaf, sites.weights, sites.weight_scale) if "kernel" in names else leaf

    return jax.tree_util.tree_map_with_path(rounded, params)
