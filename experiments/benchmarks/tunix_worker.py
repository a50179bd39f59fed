"""google-tunix's sampler behind a pipe, in an environment of its own: it pins other versions than this package.

Started by `sampler.py` with a checkpoint's directory and the new tokens of a call. Takes a line of JSON on its input for
every call, {"prompts": [[ids]], "top_p": 1.0, "seed": 0}, and answers with a line, the number of tokens drawn.
"""

import json
import os
import pathlib
import sys

# What the libraries print must not reach the pipe.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from tunix.generate import sampler as tunix  # noqa: E402
from tunix.models.llama3 import model as llama  # noqa: E402
from tunix.models.llama3 import params as llama_params  # noqa: E402
from tunix.models.qwen3 import model as qwen3  # noqa: E402
from tunix.models.qwen3 import params as qwen3_params  # noqa: E402


class Numbers:
    """A tokenizer whose text is the ids themselves; it begins with nothing, and no id of a model is its end token."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return None

    def eos_id(self):
        return -1

    def pad_id(self):
        return 0


def load(directory: pathlib.Path):
    """(model, config.json as a mapping)."""
    c = json.loads((directory / "config.json").read_text())
    fields = {
        "num_layers": c["num_hidden_layers"],
        "vocab_size": c["vocab_size"],
        "embed_dim": c["hidden_size"],
        "hidden_dim": c["intermediate_size"],
        "num_heads": c["num_attention_heads"],
        "head_dim": c["head_dim"],
        "num_kv_heads": c["num_key_value_heads"],
        "rope_theta": c["rope_parameters"]["rope_theta"],
        "norm_eps": c["rms_norm_eps"],
    }
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    if c["model_type"] == "qwen3":
        config = qwen3.ModelConfig(**fields, use_tied_embedding=c["tie_word_embeddings"])
        return qwen3_params.create_model_from_safe_tensors(str(directory), config, mesh, jnp.float32), c
    config = llama.ModelConfig(**fields, weight_tying=c["tie_word_embeddings"])
    return llama_params.create_model_from_safe_tensors(str(directory), config, mesh, jnp.float32), c


def main(directory: str, new_tokens: int):
    model, c = load(pathlib.Path(directory))
    sampler = None
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        if sampler is None:
            room = len(call["prompts"][0]) + new_tokens
            shape = c["num_hidden_layers"], c["num_key_value_heads"], c["head_dim"]
            sampler = tunix.Sampler(model, Numbers(), tunix.CacheConfig(room, *shape))
        texts, width = [" ".join(map(str, prompt)) for prompt in call["prompts"]], len(call["prompts"][0])
        options = {"temperature": 1.0, "top_p": call["top_p"], "seed": call["seed"], "eos_tokens": [-1]}
        output = sampler(texts, new_tokens, max_prompt_length=width, **options)
        print(sum(map(len, output.tokens)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
