"""Greedy decoding of small random models against transformers' own `generate`."""

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import parity
from jaxrl_llm.hub import pretrained
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.sampler import Sampler, SamplingConfig
from jaxrl_llm.types import FinishReason

torch = pytest.importorskip("torch")

PROMPTS = [[3, 5, 6, 7], [9], [4, 8, 8, 8, 8, 30]]
LENGTH = 10


@pytest.mark.parametrize("name", ["Llama 3 (scaled rotary, GQA)", "Qwen3 (3 heads on 1)"])
def test_greedy_tokens_equal_transformers(name, tmp_path):
    theirs = parity.reference(name, tmp_path)
    theirs.generation_config.eos_token_id = None
    with torch.no_grad():
        expected = [
            theirs.generate(torch.tensor([p]), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)[0, len(p) :]
            for p in PROMPTS
        ]
    # What the model says third after the first prompt ends any response here.
    stop = int(expected[0][2])
    model = pretrained.read_config(tmp_path)
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))), nnx.Param)[0]
    sampling = SamplingConfig(LENGTH, (stop,), choice=Choice(temperature=0.0), first_chunk=LENGTH)
    rollout = Sampler(graphdef, model, sampling)(pretrained.load(tmp_path, model), PROMPTS, jax.random.key(0))
    for row, tokens in enumerate(np.stack(expected).tolist()):
        ends = stop in tokens
        tokens = tokens[: tokens.index(stop) + 1] if ends else tokens
        mask = rollout.response_mask[row]
        assert rollout.response_tokens[row][mask].tolist() == tokens
        assert rollout.finish_reason[row] == (FinishReason.STOP if ends else FinishReason.LENGTH)
