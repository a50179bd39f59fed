"""A decoder small enough to compile in a second, shared by the tests."""

import functools

import jax
import numpy as np
from flax import nnx

from jaxrl_llm.hub import hf_config, pretrained
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.tasks.tokenizer import CharTokenizer

SIZES = {"vocab_size": 19, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
SIZES |= {"num_kv_heads": 2, "head_dim": 8}


@functools.cache
def decoder(**changes):
    """(config, graphdef, params) of a two-layer decoder."""
    config = ModelConfig(**(SIZES | changes))
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param)
    # The usual 0.02 would make all logits nearly equal, and then many mistakes invisible.
    params["embedding"] = jax.tree.map(lambda x: x * 25, params["embedding"])
    return config, graphdef, params


def chat(path, alphabet, template, **changes):
    """Writes the checkpoint of a one-layer chat model that spells; returns its directory."""
    tokenizer = CharTokenizer(alphabet).to_transformers()
    tokenizer.chat_template = template
    config, _, params = decoder(vocab_size=len(tokenizer), num_layers=1, **changes)
    theirs = hf_config.to_transformers(config)
    theirs.eos_token_id = tokenizer.eos_token_id
    pretrained.save(path, params, config, theirs, tokenizer, "float32")
    return path


def left_padded(lengths, width, vocab, seed=0):
    """Random tokens, mask, positions and segment ids of left-padded rows."""
    mask = np.arange(width) >= width - np.asarray(lengths)[:, None]
    tokens = np.where(mask, np.random.default_rng(seed).integers(3, vocab, mask.shape), 0).astype(np.int32)
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int32)
    return tokens, mask, positions, mask.astype(np.int32)
