"""A truncated sampler's ratios: an unchanged policy is at r = 1 and D = 0, and a changed one where a calculation by hand says."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.analysis.mismatch import measure
from jaxrl_llm.experience import batches
from jaxrl_llm.learning.step import Forward, loss_inputs
from jaxrl_llm.objectives import divergence as dv
from jaxrl_llm.objectives.inputs import sanitize
from jaxrl_llm.objectives.mask import view_of
from jaxrl_llm.ops.fp8 import Fp8Sites
from jaxrl_llm.rollout.choice import Choice, behavior_distribution
from jaxrl_llm.rollout.sampler import Sampler, SamplingConfig
from jaxrl_llm.types import Rollout, TokenStats, TopKView
from tests import tiny

PROMPTS = [[1, 5, 6, 7], [1, 4], [1, 9, 9, 9, 9, 3]]
VOCAB = tiny.SIZES["vocab_size"]
OPTIONS = list(itertools.product([1.0, 0.8], [0, 8], [1.0, 0.9], [0.0, 0.02]))
LOGITS = np.log([0.4, 0.3, 0.2, 0.1])


@functools.cache
def compiled(temperature):
    config, graphdef, _ = tiny.decoder()
    return jax.jit(Forward(graphdef, config.vocab_size, temperature, topk=True))


def config_of(choice, width=VOCAB):
    return SamplingConfig(max_response_length=6, stop_ids=(2,), choice=choice, capture_top_k=width, first_chunk=8)


def inputs_of(choice, truncation_ratio):
    """(loss inputs, rollout) of the real sampler and the real forward, at the parameters that sampled."""
    config, graphdef, params = tiny.decoder()
    rollout = Sampler(graphdef, config, config_of(choice))(params, PROMPTS, jax.random.key(0), group_size=4)
    advantages = np.resize([1.0, -1.0], len(rollout.response_tokens)).astype(np.float32)
    batch = batches.from_rollout(rollout, advantages, truncation_ratio=truncation_ratio)
    return loss_inputs(batch, compiled(choice.temperature)(params, batch), VOCAB), rollout


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), OPTIONS)
def test_an_unchanged_policy_has_ratio_one_and_no_divergence(temperature, top_k, top_p, min_p):
    inputs, rollout = inputs_of(Choice(temperature, top_k, top_p, min_p), "whole")
    mask = np.asarray(rollout.response_mask)
    cut = (top_k, top_p, min_p) != (0, 1.0, 0.0)
    assert (np.min(rollout.log_kept_mass[mask]) < -1e-3) == cut
    if not cut:
        np.testing.assert_array_equal(inputs.behavior_logprobs, rollout.behavior_logprobs)

    np.testing.assert_allclose(np.exp(inputs.logprobs - inputs.behavior_logprobs)[mask], 1, atol=5e-5)
    for name, width in [("exact", VOCAB), ("binary", VOCAB), ("topk_aggregated", 5), ("topk_uniform", 5)]:
        top = {k: getattr(inputs, k)[..., :width] for k in ("topk_ids", "behavior_topk_logprobs", "topk_logprobs")}
        view = view_of(sanitize(inputs.replace(**top)), name)
        for kind_name, kind in dv.DIVERGENCES.items():
            np.testing.assert_allclose(dv.divergence(view, kind)[mask], 0, atol=5e-5, err_msg=name)
            if kind_name == "tv":
                continue  # TV has a kink where pi = mu: rounding alone decides the signs that its D_dot is made of
            np.testing.assert_allclose(dv.directional_derivative(view, kind)[mask], 0, atol=5e-5, err_msg=name)

    loss = objectives.build({"name": "dppo"})
    terms = loss(inputs)
    # Nothing is masked, so the loss's numerator is -A summed: the ratios are all 1.
    expected = -np.sum(np.asarray(inputs.advantages)[mask])
    np.testing.assert_allclose(terms.numerator, expected, atol=5e-3)


def test_the_sampled_form_has_the_kept_mass_as_its_ratio():
    inputs, rollout = inputs_of(Choice(0.8, 8, 0.9, 0.02, topk_view="sampled"), "sampled")
    mask = np.asarray(rollout.response_mask)
    ratio = np.exp(inputs.logprobs - inputs.behavior_logprobs)[mask]
    np.testing.assert_allclose(ratio, np.exp(rollout.log_kept_mass)[mask], atol=5e-5)
    assert ratio.mean() < 0.99
    assert np.isneginf(inputs.behavior_topk_logprobs[mask]).any()


@pytest.mark.parametrize(
    ("form", "ratio", "tv"),
    # Kept of (.4, .3, .2, .1) by top_k 2: (.4, .3), mass .7. pi afterwards: (.25, .25, .25, .25); token 0 was drawn.
    # whole: r = .25 / .4, TV = (.15 + .05 + .05 + .15) / 2. sampled: mu = (4/7, 3/7, 0, 0), r = .25 * 7 / 4,
    # TV = (4/7 - 1/4 + 3/7 - 1/4 + 1/4 + 1/4) / 2.
    [("whole", 0.625, 0.2), ("sampled", 0.4375, 0.5)],
)
def test_a_changed_policy_by_hand(form, ratio, tv):
    got = behavior_distribution(jnp.asarray(LOGITS, jnp.float32)[None], Choice(top_k=2, topk_view=form), capture=4)
    rollout = Rollout(
        prompt_tokens=np.array([[1]], np.int32),
        prompt_mask=np.array([[True]]),
        response_tokens=np.array([[0]], np.int32),
        response_mask=np.array([[True]]),
        finish_reason=np.array([1], np.int32),
        behavior_logprobs=np.asarray(got.logprobs[:, :1]),
        group_ids=np.array([0], np.int32),
        log_kept_mass=np.asarray(got.log_kept_mass[:, None]),
        topk=TopKView(got.topk.ids[:, None], got.topk.logprobs[:, None]),
    )
    batch = batches.from_rollout(rollout, jnp.ones(1), truncation_ratio=form)
    even = jnp.full((1, 1), np.log(0.25), jnp.float32)
    stats = TokenStats(logprobs=even, topk_logprobs=jnp.repeat(even[..., None], 4, axis=-1))
    tokens = sanitize(loss_inputs(batch, stats, 4))
    np.testing.assert_allclose(tokens.ratio, [[ratio]], rtol=1e-5)
    np.testing.assert_allclose(dv.divergence(view_of(tokens, "exact"), dv.DIVERGENCES["tv"]), [[tv]], rtol=1e-5)


def test_truncation_is_no_mismatch():
    config, graphdef, params = tiny.decoder()
    choice = Choice(0.8, 8, 0.9, 0.02)
    found = measure(
        graphdef, config, params, config_of(choice, 0), Fp8Sites(), PROMPTS, jax.random.key(0), group_size=4
    )
    assert found.max < 5e-5


def test_an_unknown_form_is_named():
    _, rollout = inputs_of(Choice(), "whole")
    with pytest.raises(ValueError, match="truncation_ratio"):
        batches.from_rollout(rollout, jnp.zeros(12), truncation_ratio="half")
