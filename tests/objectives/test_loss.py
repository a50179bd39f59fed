"""Composed losses: worked examples, invariances, edges, shards. Each number is worked out by hand or in plain numpy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm import objectives
from jaxrl_llm.objectives import OBJECTIVES, LossInputs
from tests.objectives.helpers import make_inputs

NAMES = sorted(OBJECTIVES)
MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant")


def build(name, aggregation=None, **sections):
    hyper = sections.pop("hyper", {})
    return objectives.build({"name": name, name: hyper, "aggregation": aggregation or {}, **sections})


@functools.partial(jax.jit, static_argnums=0)
def terms_and_gradient(loss, inputs):
    """Terms of a batch, and the gradient of its numerator in the log-probs."""

    def numerator(logprobs):
        terms = loss(inputs.replace(logprobs=logprobs))
        return terms.numerator, terms

    (_, terms), gradient = jax.value_and_grad(numerator, has_aux=True)(inputs.logprobs)
    return terms, gradient


def value_and_gradient(loss, inputs):
    """Value and gradient in the log-probs of the whole batch."""
    terms, gradient = terms_and_gradient(loss, inputs)
    return tuple(np.asarray(objectives.divide(x, terms.denominator)) for x in (terms.numerator, gradient))


# Three tokens of one sequence, vocabulary 4. The sampled tokens' probabilities under mu and pi, and the advantages:
#   token 1: mu .5 -> pi .6, A +1   (r 1.2)    token 2: mu .4 -> pi .2, A -1   (r 0.5)    token 3: mu .2 -> pi .3, A +2   (r 1.5)
MU, PI, A = np.array([[0.5, 0.4, 0.2]]), np.array([[0.6, 0.2, 0.3]]), np.array([[1.0, -1.0, 2.0]])
WORKED = {
    "reinforce": ({}, -(1 * np.log(0.6) - np.log(0.2) + 2 * np.log(0.3)) / 3),
    "pg_is": ({}, (-1.2 + 0.5 - 3.0) / 3),
    # Clip at [.8, 1.2]: token 1 on the bound, token 2 pessimistic -(-1)(.8), token 3 bounded at 1.2.
    "ppo_clip": ({}, (-1.2 + 0.8 - 2.4) / 3),
    "dapo": ({}, (-1.2 + 0.8 - 2 * 1.28) / 3),
    "grpo": ({}, (-1.2 + 0.8 - 2.4) / 3),
    "dr_grpo": ({}, (-1.2 + 0.8 - 2.4) / 1024),
    # Geometric mean of the ratios is .9 ^ (1/3) = .965489, below 1 - 3e-4: only the negative token is clipped.
    "gspo": ({}, (-(0.9 ** (1 / 3)) + 0.9997 - 2 * 0.9 ** (1 / 3)) / 3),
    "cispo": ({}, -(1.2 * np.log(0.6) - 0.5 * np.log(0.2) + 2 * 1.5 * np.log(0.3)) / 3),
    # Penalties abs(A) (r - 1)^2 / .4: .1, .625, 1.25.
    "spo": ({}, (-1.2 + 0.1 + 0.5 + 0.625 - 3.0 + 1.25) / 3),
    # Shifts .1, .2, .1 against TV .15: only token 2 is outside, A (r - 1) > 0 there: masked.
    "dppo": ({"divergence": "binary_tv", "delta_low": 0.15, "delta_high": 0.15}, (-1.2 + 0.0 - 3.0) / 3),
    # Binary KLs .0204, .0915, .0282 against .05: the same token.
    "pdm": ({"view": "binary", "delta_low": 0.05, "delta_high": 0.05}, (-1.2 + 0.0 - 3.0) / 3),
    # Penalties abs(A) mu (r - 1)^2 / .3: .5 * .04 / .3, .4 * .25 / .3, 2 * .2 * .25 / .3.
    "drpo": ({}, (-1.2 + 0.02 / 0.3 + 0.5 + 0.1 / 0.3 - 3.0 + 0.1 / 0.3) / 3),
    "drpo_unweighted": ({}, (-1.2 + 0.02 / 0.3 + 0.5 + 0.1 / 0.3 - 3.0 + 0.05 / 0.3) / 3),
    "drpo_chi2": ({}, (-1.2 + 0.04 / 0.3 + 0.5 + 0.25 / 0.3 - 3.0 + 2 * 0.25 / 0.3) / 3),
    "drpo_kl": (
        {},
        (-3.7 + ((0.2 - np.log(1.2)) + (-0.5 - np.log(0.5)) + 2 * (0.5 - np.log(1.5))) / 0.15) / 3,
    ),
    "drpo_tv": ({}, (-3.7 + (0.1 + 0.2 + 2 * 0.1) / 0.15) / 3),
    # Only token 2 has shifted by more than .15.
    "mask_drpo": ({}, (-1.2 + 0.5 + 0.1 / 0.3 - 3.0) / 3),
    # Log-ratios .1823, -.6931, .4055 with signs +, -, +: residuals .0177, 0, 0.
    "ppo_or": ({}, (0.2 - np.log(1.2)) ** 2 / 3),
    "grpo_or": ({}, (0.2 - np.log(1.2)) ** 2 / 3),
}


class Worked(chex.TestCase):
    @chex.all_variants
    @parameterized.named_parameters(*((name, name) for name in NAMES))
    def test_three_tokens_by_hand(self, name):
        hyper, expected = WORKED[name]
        loss = build(name, hyper=hyper)

        def value(logprobs, behavior, advantages):
            inputs = LossInputs(logprobs, behavior, advantages, jnp.ones((1, 3), bool), old_logprobs=behavior)
            terms = loss(inputs)
            return terms.numerator / terms.denominator

        arrays = (x.astype(np.float32) for x in (np.log(PI), np.log(MU), A))
        np.testing.assert_allclose(self.variant(value)(*arrays), expected, rtol=2e-6)


def test_every_objective_has_a_worked_example():
    assert set(WORKED) == set(OBJECTIVES)


@pytest.mark.parametrize("name", NAMES)
class TestInvariances:
    """Every objective, with penalties and a sequence mask on."""

    def loss(self, name, mode="token_mean"):
        return build(
            name,
            aggregation={"mode": mode, "horizon": 7},
            penalty={"kl": 0.1, "entropy": 0.01},
            correction={"weight": "tis", "sequence_delta": 3.0},
        )

    def test_masked_positions_may_hold_anything(self, name):
        inputs = make_inputs(dtype=np.float32)
        expected = value_and_gradient(self.loss(name), inputs)
        for garbage in (np.nan, np.inf, -np.inf, 1e30):
            fields = {}
            for field in (
                "logprobs",
                "behavior_logprobs",
                "old_logprobs",
                "reference_logprobs",
                "entropy",
                "advantages",
            ):
                fields[field] = np.where(inputs.mask, getattr(inputs, field), garbage).astype(np.float32)
            for field in ("topk_logprobs", "behavior_topk_logprobs"):
                fields[field] = np.where(inputs.mask[..., None], getattr(inputs, field), garbage).astype(np.float32)
            value, gradient = value_and_gradient(self.loss(name), inputs.replace(**fields))
            np.testing.assert_array_equal(value, expected[0])
            np.testing.assert_array_equal(gradient, expected[1])

    def test_padding_length_and_row_order_do_not_matter(self, name):
        inputs = make_inputs(dtype=np.float32)
        value, gradient = value_and_gradient(self.loss(name), inputs)
        padded = jax.tree.map(lambda x: np.pad(x, [(0, 0), (0, 3)] + [(0, 0)] * (x.ndim - 2)), inputs)
        wide_value, wide_gradient = value_and_gradient(self.loss(name), padded)
        np.testing.assert_allclose(wide_value, value, rtol=1e-6)
        np.testing.assert_allclose(wide_gradient[:, :-3], gradient, rtol=1e-6, atol=1e-8)
        turned_value, turned_gradient = value_and_gradient(self.loss(name), jax.tree.map(lambda x: x[::-1], inputs))
        np.testing.assert_allclose(turned_value, value, rtol=1e-6)
        np.testing.assert_allclose(turned_gradient[::-1], gradient, rtol=1e-6, atol=1e-8)

    def test_micro_batches_add_up(self, name):
        # Aggregation knows no objective: all modes for one of tokens and one of sequences, one in turn for each other.
        turn = NAMES.index(name) % len(MODES)
        inputs = make_inputs(batch=4, dtype=np.float32)
        for mode in MODES if name in ("pdm", "gspo") else MODES[turn : turn + 1]:
            loss = self.loss(name, mode)
            value, gradient = value_and_gradient(loss, inputs)
            for parts in (2, 4):
                total, gradients = None, []
                for rows in np.split(np.arange(4), parts):
                    terms, part = terms_and_gradient(loss, jax.tree.map(lambda x: x[rows], inputs))  # noqa: B023
                    gradients.append(part)
                    total = terms if total is None else objectives.add(total, terms)
                np.testing.assert_allclose(total.numerator / total.denominator, value, rtol=2e-6, atol=1e-8)
                np.testing.assert_allclose(
                    np.concatenate(gradients) / total.denominator, gradient, rtol=2e-6, atol=1e-8
                )

    def test_an_empty_mask_gives_zero_and_no_gradient(self, name):
        inputs = make_inputs(dtype=np.float32)
        value, gradient = value_and_gradient(self.loss(name), inputs.replace(mask=np.zeros_like(inputs.mask)))
        assert value == 0
        np.testing.assert_array_equal(gradient, 0)

    def test_extreme_log_ratios_stay_finite(self, name):
        inputs = make_inputs(dtype=np.float32)
        for far in (-1e4, 1e4, -100.0, 50.0, -np.inf):
            logprobs = np.minimum(np.full_like(inputs.logprobs, far), 0)
            for changed in (
                inputs.replace(logprobs=logprobs),
                inputs.replace(behavior_logprobs=logprobs, old_logprobs=logprobs),
            ):
                value, gradient = value_and_gradient(build(name), changed)
                assert np.isfinite(value), far
                assert np.isfinite(gradient).all(), far

    def test_float32_follows_float64(self, name):
        with jax.enable_x64(True):
            double = value_and_gradient(self.loss(name), make_inputs(dtype=np.float64))
        single = value_and_gradient(self.loss(name), make_inputs(dtype=np.float32))
        assert single[0].dtype == np.float32
        np.testing.assert_allclose(single[0], double[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(single[1], double[1], rtol=1e-4, atol=1e-6)

    def test_shards_give_the_whole_batch(self, name):
        shards = 2
        inputs = make_inputs(batch=4, dtype=np.float32)
        loss = self.loss(name)
        value, gradient = value_and_gradient(loss, inputs)

        def one(part):
            terms, g = terms_and_gradient(loss, part)
            total = objectives.across(terms, "shards")
            return total.numerator / total.denominator, g / total.denominator

        split = jax.tree.map(lambda x: x.reshape(shards, 4 // shards, *x.shape[1:]), inputs)
        values, gradients = jax.pmap(one, axis_name="shards")(split)
        np.testing.assert_allclose(values, np.full(shards, value), rtol=2e-6, atol=1e-8)
        np.testing.assert_allclose(gradients.reshape(gradient.shape), gradient, rtol=2e-6, atol=1e-8)

        mesh = Mesh(np.array(jax.devices()[:shards]), ("shards",))
        spec = PartitionSpec("shards")
        mapped = jax.jit(
            jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=(PartitionSpec(), spec), check_vma=False)
        )
        mapped_value, mapped_gradient = mapped(jax.tree.map(jnp.asarray, inputs))
        np.testing.assert_allclose(mapped_value, value, rtol=2e-6, atol=1e-8)
        np.testing.assert_allclose(mapped_gradient, gradient, rtol=2e-6, atol=1e-8)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_pdm_is_dppo_wherever_the_criteria_agree(seed):
    inputs = make_inputs(seed, dtype=np.float32)
    shared = {"delta_low": 0.05, "delta_high": 0.05}
    from jaxrl_llm.objectives import divergence as dv
    from jaxrl_llm.objectives.inputs import sanitize
    from jaxrl_llm.objectives.mask import view_of

    t = sanitize(inputs)
    rate = dv.directional_derivative(view_of(t, "topk_aggregated"))
    agree = np.sign(rate) == np.sign(t.ratio - 1)
    dppo = build("dppo", hyper={"divergence": "topk_kl", **shared}).token_loss(t)
    pdm = build("pdm", hyper=shared).token_loss(t)
    np.testing.assert_array_equal(np.where(agree, dppo.kept, 0), np.where(agree, pdm.kept, 0))
    np.testing.assert_array_equal(np.where(agree, dppo.loss, 0), np.where(agree, pdm.loss, 0))


def test_a_token_on_the_boundary_is_kept():
    # Shift exactly .25, threshold exactly .25 in binary floating point.
    inputs = LossInputs(*(np.float32(x).reshape(1, 1) for x in (np.log(0.75), np.log(0.5), 1.0)), np.ones((1, 1), bool))
    pi, mu = (float(jnp.exp(x)[0, 0]) for x in (inputs.logprobs, inputs.behavior_logprobs))
    shift = float(
        np.abs(np.float32(mu) - np.float32(pi)) * 0.5 + np.float32(0.5) * np.float32(abs((1 - mu) - (1 - pi)))
    )
    for delta, kept in ((shift + 1e-6, True), (shift - 1e-6, False)):
        loss = build("dppo", hyper={"divergence": "binary_tv", "delta_low": delta, "delta_high": delta})
        terms = loss(inputs)
        assert (float(terms.metrics["mask/share"].numerator) == 0.0) == kept
    # D_dot = 0: pi equal to mu everywhere, threshold below D = 0.
    same = make_inputs(dtype=np.float32)
    same = same.replace(logprobs=same.behavior_logprobs, topk_logprobs=same.behavior_topk_logprobs)
    terms = build("pdm", hyper={"delta_low": -1.0, "delta_high": -1.0})(same)
    assert float(terms.metrics["divergence/outside"].numerator) > 0


def test_thresholds_depend_on_the_advantages_sign():
    def masked(advantage, mu, pi):
        inputs = LossInputs(
            *(np.float32(x).reshape(1, 1) for x in (np.log(pi), np.log(mu), advantage)), np.ones((1, 1), bool)
        )
        loss = build("dppo", hyper={"divergence": "binary_tv", "delta_low": 0.3, "delta_high": 0.1})
        return float(loss(inputs).metrics["mask/share"].numerator)

    assert masked(1.0, 0.4, 0.6) == 1  # .2 > .1
    assert masked(-1.0, 0.6, 0.4) == 0  # .2 <= .3
    assert masked(1.0, 0.6, 0.4) == 0  # leads back


def test_worked_dppo_decisions_of_the_paper():
    def masked(mu, pi, advantage, divergence, delta):
        inputs = LossInputs(
            *(np.float32(x).reshape(1, 1) for x in (np.log(pi), np.log(mu), advantage)), np.ones((1, 1), bool)
        )
        loss = build("dppo", hyper={"divergence": divergence, "delta_low": delta, "delta_high": delta})
        return bool(loss(inputs).metrics["mask/share"].numerator)

    assert not masked(1e-4, 1e-2, 1, "binary_tv", 0.15)
    assert masked(0.99, 0.80, -1, "binary_tv", 0.15)
    assert not masked(0.99, 0.80, -1, "binary_tv", 0.2)
    assert masked(0.99, 0.80, -1, "binary_kl", 0.05)


def test_a_missing_behavior_logprob_has_ratio_one_and_is_counted():
    inputs = make_inputs(dtype=np.float32)
    broken = np.array(inputs.behavior_logprobs)
    broken[0, 1] = np.nan
    terms = build("pg_is")(inputs.replace(behavior_logprobs=broken))
    assert float(terms.metrics["ratio/missing_behavior"].numerator) == 1
    ratio = np.exp(inputs.logprobs - np.nan_to_num(broken, nan=0.0))
    ratio[0, 1] = 1.0
    expected = -(inputs.advantages * ratio)[inputs.mask].sum()
    np.testing.assert_allclose(terms.numerator, expected, rtol=1e-5)


def test_gspo_survives_a_log_ratio_of_fifty_a_token():
    near, far = np.full((1, 100), -0.1, np.float32), np.full((1, 100), -50.1, np.float32)
    inputs = LossInputs(near, far, np.ones((1, 100), np.float32), np.ones((1, 100), bool))
    value, gradient = value_and_gradient(build("gspo"), inputs)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_sequence_correction_levels_do_what_their_names_say():
    # Log-ratio +.001 over 2,000 tokens: product e^2 = 7.389, geometric mean e^.001.
    from jaxrl_llm.objectives.correction import importance_ratio

    old, mu, mask = np.full((1, 2000), -1.0), np.full((1, 2000), -1.001), np.ones((1, 2000), bool)
    with jax.enable_x64(True):
        for level, expected in (
            ("token", np.exp(0.001)),
            ("sequence_product", 7.389056),
            ("sequence_geometric", np.exp(0.001)),
        ):
            np.testing.assert_allclose(importance_ratio(old, mu, mask, level), expected, rtol=1e-6)


def test_corrections_weigh_cut_and_reject():
    mu = np.log(np.array([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], np.float32))
    old = np.log(np.array([[0.5, 0.9, 0.1], [0.5, 0.5, 0.5]], np.float32))  # ratios 1, 1.8, .2
    # The policy is pi_old still: the ratio is 1, and the weights are all that is seen.
    inputs = LossInputs(old, mu, np.ones((2, 3), np.float32), np.ones((2, 3), bool), old_logprobs=old)

    def numerator(**correction):
        return float(build("pg_is", correction=correction)(inputs).numerator)

    np.testing.assert_allclose(numerator(weight="tis", high=1.5), -(1 + 1.5 + 0.2 + 3), rtol=1e-6)
    np.testing.assert_allclose(numerator(weight="mis", low=0.5, high=2.0), -(1 + 1.8 + 0 + 3), rtol=1e-6)
    # The current policy has left the first sequence's trust region on one token: all of it is rejected.
    far = inputs.replace(logprobs=np.log(np.array([[0.5, 0.99, 0.5], [0.5, 0.5, 0.5]], np.float32)))
    terms = build("pg_is", correction={"sequence_delta": 0.5})(far)
    np.testing.assert_allclose(terms.numerator, -3.0, rtol=1e-6)
    assert float(terms.denominator) == 6  # rejected sequences stay in the denominator
    kept = build("pg_is", correction={"sequence_delta": 0.5}, aggregation={"denominator": "kept"})(far)
    assert float(kept.denominator) == 3


def test_a_weight_implies_the_ratio_over_the_old_policy():
    # mu .2, old .4, pi .5: weight 2 times ratio 1.25, which is pi / mu once and not the mismatch twice (2 * 2.5).
    mu, old, pi = (np.log(np.full((1, 1), p, np.float32)) for p in (0.2, 0.4, 0.5))
    inputs = LossInputs(pi, mu, np.ones((1, 1), np.float32), np.ones((1, 1), bool), old_logprobs=old)
    weighed = build("pg_is", correction={"weight": "tis", "high": 3.0})
    np.testing.assert_allclose(weighed(inputs).numerator, -2.5, rtol=1e-6)
    with pytest.raises(ValueError, match=r"correction\.weight 'tis'.*config\.objective\.anchor is 'behavior'"):
        build("pg_is", correction={"weight": "tis"}, anchor="behavior")


@pytest.mark.parametrize("name", ["dppo", "pdm"])
def test_direction_and_proximity_speak_of_the_same_pair(name):
    # mu .3, old .6, pi .55, A > 0: D(mu, pi) = .128 leads out, though pi / pi_old < 1. Leading back is kept.
    block = {"dppo": {"divergence": "binary_kl"}, "pdm": {"view": "binary", "delta_high": 0.05, "delta_low": 0.05}}[
        name
    ]
    mu, old, pi = (np.log(np.full((1, 1), p, np.float32)) for p in (0.3, 0.6, 0.55))
    for advantage, kept in ((1.0, False), (-1.0, True)):
        inputs = LossInputs(pi, mu, np.full((1, 1), advantage, np.float32), np.ones((1, 1), bool), old_logprobs=old)
        found = float(build(name, anchor="old", **{name: block})(inputs).numerator)
        np.testing.assert_allclose(found, -advantage * 0.55 / 0.6 if kept else 0.0, rtol=1e-6)


def test_a_clipped_token_is_not_rejected():
    # Four tokens, ratios 1 and e^1 (clipped at 1.2), A = 1: the clipped ones stay in the denominator, with their penalty.
    mu = np.zeros((1, 4), np.float32) - 2
    pi = mu + np.array([[0, 0, 1, 1]], np.float32)
    inputs = LossInputs(pi, mu, np.ones((1, 4), np.float32), np.ones((1, 4), bool), reference_logprobs=mu)
    loss = build("ppo_clip", penalty={"kl": 0.1, "kl_estimator": "k2"}, aggregation={"denominator": "kept"})
    terms = loss(inputs)
    assert float(terms.denominator) == 4
    np.testing.assert_allclose(terms.numerator, -(1 + 1 + 1.2 + 1.2) + 0.1 * (0.5 + 0.5), rtol=1e-6)


def test_token_mean_is_one_mean_over_tokens():
    # Lengths 10 and 2, per-token losses 1 and 3: (10 + 6) / 12.
    from jaxrl_llm.objectives.aggregate import aggregate

    mask = np.arange(10) < np.array([[10], [2]])
    n, d = aggregate(jnp.array([[1.0], [3.0]]) * jnp.ones((2, 10)), mask, "token_mean")
    np.testing.assert_allclose(n / d, 4 / 3, rtol=1e-6)
    for mode, expected in (("seq_mean_token_mean", 2.0), ("seq_mean_token_sum", 8.0), ("seq_sum_constant", 0.8)):
        n, d = aggregate(jnp.array([[1.0], [3.0]]) * jnp.ones((2, 10)), mask, mode, 10)
        np.testing.assert_allclose(n / d, expected, rtol=1e-6)
    # 30 tokens of which 5 belong to a truncated sequence that is left out: divide by 25.
    n, d = aggregate(jnp.ones((6, 5)), jnp.ones((6, 5), bool).at[2].set(False), "token_mean")
    assert (float(n), float(d)) == (25.0, 25.0)


def test_a_sequence_weight_is_spread_over_tokens_not_rows():
    # B = T = 2: weights of the two sequences 2 and 0 (ratios e^.6931 and beyond the band).
    mu = np.log(np.full((2, 2), 0.25, np.float32))
    old = np.log(np.array([[0.5, 0.5], [0.001, 0.001]], np.float32))
    inputs = LossInputs(old, mu, np.array([[1, 2], [3, 4]], np.float32), np.ones((2, 2), bool), old_logprobs=old)
    loss = build("pg_is", correction={"weight": "mis", "level": "sequence_geometric", "low": 0.5, "high": 3.0})
    np.testing.assert_allclose(loss(inputs).numerator, -(2 * 1 + 2 * 2), rtol=1e-5)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", -0.5), ("k2", 0.125), ("k3", np.exp(0.5) - 1.5), ("low_variance", np.exp(0.5) - 1.5)],
)
def test_kl_estimators(estimator, expected):
    from jaxrl_llm.objectives.penalty import kl_estimate

    value = kl_estimate(jnp.float32([-1.5]), jnp.float32([-1.0]), estimator)
    np.testing.assert_allclose(value, [expected], rtol=1e-5)
    for x in (-100.0, 100.0, 1e4):
        f = functools.partial(kl_estimate, reference_logprobs=jnp.float32([x]), estimator=estimator)
        assert np.isfinite(f(jnp.float32([0.0]))).all()
        assert np.isfinite(jax.grad(lambda v: f(v).sum())(jnp.float32([0.0]))).all()  # noqa: B023


def test_k3_keeps_its_digits_for_small_differences():
    from jaxrl_llm.objectives.penalty import kl_estimate

    value = kl_estimate(jnp.float32([-1.0]), jnp.float32([-1.0 + 2**-10]), "k3")
    np.testing.assert_allclose(value, [np.expm1(2.0**-10) - 2.0**-10], rtol=5e-3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "pposo"}, "unknown objective config.objective.name 'pposo'; choose from: .*drpo"),
        ({"name": "drpo", "drpo": {"detla": 0.1}}, "unknown field config.objective.drpo.detla; choose from: .*delta"),
        ({"name": "drpo", "drpo": {"delta": "big"}}, "config.objective.drpo.delta is 'big'"),
        ({"name": "drpo", "ddpo": {}}, "unknown field config.objective.ddpo"),
        ({"name": "grpo", "anchor": "new"}, "config.objective.anchor is 'new'; choose from: default, behavior, old"),
        ({"name": "dppo", "dppo": {"divergence": "kl"}}, "config.objective.dppo.divergence is 'kl'; choose from"),
        ({"name": "grpo", "penalty": {"kl_estimator": "k1"}}, "config.objective.penalty.kl_estimator is 'k1'"),
        ({"name": "grpo", "aggregation": {"horizon": True}}, "config.objective.aggregation.horizon is True"),
    ],
)
def test_a_wrong_configuration_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        objectives.build(config)


def test_missing_statistics_are_named():
    inputs = make_inputs(dtype=np.float32)
    with pytest.raises(ValueError, match="'dppo' needs topk_logprobs"):
        build("dppo")(inputs.replace(topk_logprobs=None))
    with pytest.raises(ValueError, match="'grpo_or' needs old_logprobs"):
        build("grpo_or")(inputs.replace(old_logprobs=None))
    with pytest.raises(ValueError, match="needs K = V = 6 captured log-probs, got K = 3"):
        build("pdm", hyper={"view": "exact"})(inputs)


def test_only_what_an_objective_needs_is_asked_for():
    assert build("grpo").needs == frozenset()
    assert build("dppo").needs == {"topk_logprobs"}
    assert build("dppo", hyper={"divergence": "binary_kl"}).needs == frozenset()
    assert build("pdm", hyper={"view": "binary"}).needs == frozenset()
    assert build("grpo_or", penalty={"kl": 0.1, "entropy": 0.01}).needs == {
        "old_logprobs",
        "reference_logprobs",
        "entropy",
    }


def test_changing_the_name_alone_switches_objectives():
    config = objectives.default_config()
    for name in NAMES:
        assert objectives.build(config | {"name": name}).name == name
