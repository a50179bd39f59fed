"""The sampler's record against the trainer's forward, and its behaviour at the edges."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.experience import batches
from jaxrl_llm.learning.step import Forward
from jaxrl_llm.models.config import DeltaNetConfig, MoEConfig
from jaxrl_llm.models.decoder import unstack_layers
from jaxrl_llm.ops.fp8 import Fp8Sites
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.placement import Loaded
from jaxrl_llm.rollout.sampler import Sampler, SamplingConfig
from jaxrl_llm.types import FinishReason
from tests import tiny

PROMPTS = [[1, 5, 6, 7], [1, 4], [1, 9, 9, 9, 9, 3]]


def sampler(**changes):
    config, graphdef, params = tiny.decoder()
    fields = {
        "max_response_length": 12,
        "stop_ids": (2,),
        "capture_top_k": 5,
        "capture_entropy": True,
        "first_chunk": 12,
    }
    return Sampler(graphdef, config, SamplingConfig(**(fields | changes))), params


def trainer_stats(rollout, temperature=1.0):
    config, graphdef, params = tiny.decoder()
    batch = batches.from_rollout(rollout, jnp.ones(len(rollout.response_tokens)))
    return jax.jit(Forward(graphdef, config.vocab_size, temperature, entropy=True, topk=True))(params, batch)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_without_emulation_the_trainer_computes_the_same_log_probs(temperature):
    sample, params = sampler(choice=Choice(temperature))
    rollout = sample(params, PROMPTS, jax.random.key(0), group_size=4)
    stats, mask = trainer_stats(rollout, temperature), np.asarray(rollout.response_mask)
    # The bound: float32 rounding of two programs with other shapes.
    np.testing.assert_allclose(np.asarray(stats.logprobs)[mask], np.asarray(rollout.behavior_logprobs)[mask], atol=2e-5)
    np.testing.assert_allclose(
        np.asarray(stats.topk_logprobs)[mask], np.asarray(rollout.topk.logprobs)[mask], atol=2e-5
    )
    np.testing.assert_allclose(np.asarray(stats.entropy)[mask], np.asarray(rollout.entropy)[mask], atol=2e-5)
    ids = np.sort(np.asarray(rollout.topk.ids)[mask], axis=-1)
    assert (np.diff(ids) > 0).all()
    assert (np.diff(np.asarray(rollout.topk.logprobs)[mask]) <= 0).all()


@pytest.mark.parametrize(
    "sites",
    [
        {"logits": "e4m3"},
        {"weights": "e5m2"},
        {"activations": "e4m3"},
        {"kv_cache": "e5m2"},
        {"logits": "e4m3", "weights": "e4m3", "weight_scale": "block", "activations": "e5m2", "kv_cache": "e4m3"},
    ],
    ids=lambda sites: "+".join(sites),
)
def test_each_emulated_site_makes_a_mismatch_of_its_own(sites):
    sites = Fp8Sites(**sites)
    sample, params = sampler(choice=Choice(fp8=sites.logits), fp8=sites, max_response_length=4)
    rollout = sample(params, PROMPTS, jax.random.key(0), group_size=4)
    mask = np.asarray(rollout.response_mask)
    gap = np.abs(np.asarray(trainer_stats(rollout).logprobs) - np.asarray(rollout.behavior_logprobs))[mask]
    assert np.isfinite(gap).all()
    assert 1e-4 < gap.mean() < 0.5


def test_a_sequence_depends_on_its_prompt_key_and_seed_alone():
    sample, params = sampler()
    together = sample(params, PROMPTS, jax.random.key(3), seeds=[7, 8, 9])
    turned = sample(params, [*PROMPTS[::-1], [1, 2, 3]], jax.random.key(3), seeds=[9, 8, 7, 1])
    alone = sample(params, PROMPTS[1:2], jax.random.key(3), seeds=[8])
    for row in range(3):
        np.testing.assert_array_equal(turned.response_tokens[2 - row], together.response_tokens[row])
    np.testing.assert_array_equal(alone.response_tokens[0], together.response_tokens[1])
    again = sample(params, PROMPTS, jax.random.key(4), seeds=[7, 8, 9])
    assert not np.array_equal(again.response_tokens, together.response_tokens)


def test_samples_of_a_group_differ_and_share_their_prompt():
    sample, params = sampler()
    rollout = sample(params, PROMPTS, jax.random.key(0), group_size=6)
    assert rollout.group_ids.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert rollout.prompt_tokens[6:12, -2:].tolist() == [[1, 4]] * 6
    assert len({tuple(row) for row in np.asarray(rollout.response_tokens[:6]).tolist()}) > 3


@pytest.mark.parametrize("pad_id", [0, 2])
def test_masks_come_from_the_sampler_whatever_the_pad_id(pad_id):
    sample, params = sampler(pad_id=pad_id, stop_ids=(2, 3, 4, 5))
    rollout = sample(params, PROMPTS, jax.random.key(1), group_size=16)
    tokens, mask = np.asarray(rollout.response_tokens), np.asarray(rollout.response_mask)
    reasons = set()
    for row in range(48):
        stops = np.flatnonzero(np.isin(tokens[row], (2, 3, 4, 5)) & mask[row])
        stopped = rollout.finish_reason[row] == FinishReason.STOP
        length = mask[row].sum()
        # The end token is the last valid one; nothing valid follows, and without one the response is full.
        assert mask[row, :length].all()
        assert stops.tolist() == ([length - 1] if stopped else [])
        assert stopped or length == 12
        assert (tokens[row, length:] == pad_id).all()
        reasons.add(bool(stopped))
    assert reasons == {True, False}


def test_greedy_decoding_follows_the_argmax_of_the_full_forward():
    sample, params = sampler(choice=Choice(temperature=0.0), max_response_length=6, stop_ids=())
    config, graphdef, _ = tiny.decoder()
    rollout = sample(params, PROMPTS, jax.random.key(0))
    longest = max(map(len, PROMPTS)) + 6
    tokens, segments = np.zeros((2, len(PROMPTS), longest), np.int32)
    for row, prompt in enumerate(PROMPTS):
        whole = [*prompt, *rollout.response_tokens[row].tolist()]
        tokens[row, : len(whole)], segments[row, : len(whole)] = whole, 1
    positions = np.broadcast_to(np.arange(longest), tokens.shape)

    @jax.jit
    def best(params):
        model = nnx.merge(graphdef, params)
        return jnp.argmax(model.logits(model.hidden(tokens, positions, segments)), axis=-1)

    # Each token is the best continuation of those before it, and so, by induction, are all of them.
    best = np.asarray(best(params))
    for row, prompt in enumerate(PROMPTS):
        assert rollout.response_tokens[row].tolist() == best[row, len(prompt) - 1 : len(prompt) + 5].tolist()


def test_truncated_sampling_records_the_mass_it_kept():
    sample, params = sampler(choice=Choice(top_k=3))
    rollout = sample(params, PROMPTS, jax.random.key(0), group_size=2)
    mask = np.asarray(rollout.response_mask)
    full = np.asarray(trainer_stats(rollout).logprobs)
    np.testing.assert_allclose(
        (np.asarray(rollout.behavior_logprobs) + np.asarray(rollout.log_kept_mass))[mask], full[mask], atol=2e-5
    )


def test_bad_requests_are_named():
    sample, params = sampler()
    with pytest.raises(ValueError, match=r"prompts\[1\] is \[\]"):
        sample(params, [[1], []], jax.random.key(0))
    with pytest.raises(ValueError, match="seeds is 1; it must be one per response, 3"):
        sample(params, PROMPTS, jax.random.key(0), seeds=[1])
    wide = dataclasses.replace(sample, config=dataclasses.replace(sample.config, capture_top_k=20))
    with pytest.raises(ValueError, match="capture_top_k is 20; it must be at most the vocabulary's size, 19"):
        wide(params, PROMPTS, jax.random.key(0))
    with pytest.raises(ValueError, match="capture_top_k is True"):
        SamplingConfig(max_response_length=1, stop_ids=(), capture_top_k=True)


def test_what_is_loaded_is_as_wide_as_the_model_computes_and_draws_the_same():
    """Attention, gated delta net, experts with a router, biases and a head, trained in float32, computing in bfloat16."""
    config, graphdef, params = tiny.decoder(
        dtype="bfloat16",
        attention_bias=True,
        tie_word_embeddings=False,
        layer_types=("linear_attention", "full_attention"),
        delta_net=DeltaNetConfig(num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8, conv_size=3),
        moe=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=16),
    )
    sampler = Sampler(graphdef, config, SamplingConfig(max_response_length=12, stop_ids=(2,)))
    loaded, wide = sampler.load(params), Loaded(params, unstack_layers(params))
    drawn, expected = (sampler(x, PROMPTS, jax.random.key(3), group_size=4) for x in (loaded, wide))
    np.testing.assert_array_equal(drawn.response_tokens, expected.response_tokens)
    np.testing.assert_array_equal(drawn.behavior_logprobs, expected.behavior_logprobs)
    rest = {name: part for name, part in loaded.params.items() if name != "layers"}
    for path, leaf in jax.tree_util.tree_leaves_with_path((rest, loaded.layers)):
        kept = {"scale", "log_rate", "decay_bias"} & {getattr(key, "key", None) for key in path}
        assert leaf.dtype == (jnp.float32 if kept else jnp.bfloat16), path
