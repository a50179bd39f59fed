"""How far apart two token distributions are (D), and how fast a policy-gradient step moves them (D_dot).

The pair (mu, pi) is seen through a `View`: a list of slots, each with a probability under both and a count of identical
tokens that it stands for. The exact distribution, the two-point view of the sampled token and the truncated top-K views
are all lists of slots, so D and D_dot are written once for every divergence and every view.

A policy-gradient step on the sampled token k moves the logits along v = onehot(k) - pi. With g_j = dD / dpi_j,

    D_dot = sum_j g_j pi_j (v_j - sum_i pi_i v_i)

and for KL(mu || pi) this is (pi_k - mu_k) + sum_i pi_i (mu_i - pi_i): the local term has the sign of r - 1, the global
one is what predictive masks add (arXiv 2607.10848). A step with advantage A increases D where A * D_dot > 0.

Divergences are constants for differentiation; take logits' gradients through the losses, not through these.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import chex
import flax.struct
import jax
import jax.numpy as jnp

# Probabilities below e^-100 count as e^-100 in logarithms, so that D is large but finite where pi has no mass.
LOG_FLOOR = -100.0

Tail = Literal["aggregated", "uniform"]
TopKSet = Literal["union", "replace"]


@flax.struct.dataclass
class View:
    """A pair of distributions on a common list of J slots.

    Attributes:
      log_mu, log_pi: float [..., J], log-probability of one token of the slot, within [LOG_FLOOR, 0].
      mu, pi: float [..., J], the probabilities; exactly 0 where there is none.
      count: float [..., J], how many identical tokens the slot stands for (0: an empty slot).
      sampled: bool [..., J], the slot of the sampled token.
    """

    log_mu: jax.Array
    log_pi: jax.Array
    mu: jax.Array
    pi: jax.Array
    count: jax.Array
    sampled: jax.Array


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A divergence sum_j term(mu_j, pi_j).

    Attributes:
      term: (mu, pi, log_mu, log_pi) -> contribution of one token.
      slope: same arguments -> d term / d pi times pi (the product stays finite where pi is 0).
    """

    term: Callable[..., jax.Array]
    slope: Callable[..., jax.Array]


def _kl_term(mu, pi, log_mu, log_pi):
    return mu * (log_mu - log_pi)


def _reverse_kl_term(mu, pi, log_mu, log_pi):
    return pi * (log_pi - log_mu)


# KL(mu || pi): the divergence of DPPO and PDM.
KL = Divergence(_kl_term, lambda mu, pi, log_mu, log_pi: -mu)
# KL(pi || mu); the constant in its slope cancels in D_dot only if both distributions are normalised, so it is kept.
REVERSE_KL = Divergence(_reverse_kl_term, lambda mu, pi, log_mu, log_pi: pi * (log_pi - log_mu + 1))
# Total variation, 1/2 sum |mu - pi|; its derivative is one-sided where mu = pi and taken as 0 there.
TV = Divergence(
    lambda mu, pi, log_mu, log_pi: 0.5 * jnp.abs(mu - pi), lambda mu, pi, log_mu, log_pi: 0.5 * jnp.sign(pi - mu) * pi
)


def f_divergence(f: Callable[[jax.Array], jax.Array]) -> Divergence:
    """The divergence D_f(mu || pi) = sum_j pi_j f(mu_j / pi_j) of any smooth convex f with f(1) = 0.

    Examples: t log t gives KL(mu || pi), -log t gives KL(pi || mu), (t - 1)^2 gives chi squared.

    Args:
      f: elementwise, differentiable on (0, inf).
    """

    def bounded(log_mu, log_pi):
        # t stays within e^+-40, where it, its square and its logarithm are finite in float32; pi is floored to match.
        log_pi = jnp.maximum(log_pi, log_mu - 40.0)
        return jnp.exp(log_pi), jnp.exp(jnp.maximum(log_mu - log_pi, -40.0))

    def term(mu, pi, log_mu, log_pi):
        pi, t = bounded(log_mu, log_pi)
        return pi * f(t)

    def slope(mu, pi, log_mu, log_pi):
        pi, t = bounded(log_mu, log_pi)
        value, derivative = jax.jvp(f, (t,), (jnp.ones_like(t),))
        return pi * value - pi * t * derivative

    return Divergence(term, slope)


JENSEN_SHANNON = f_divergence(lambda t: 0.5 * (t * jnp.log(t) - (1 + t) * jnp.log((1 + t) / 2)))
HELLINGER = f_divergence(lambda t: (jnp.sqrt(t) - 1) ** 2)
CHI2 = f_divergence(lambda t: (t - 1) ** 2)

DIVERGENCES = {
    "kl": KL,
    "reverse_kl": REVERSE_KL,
    "tv": TV,
    "jensen_shannon": JENSEN_SHANNON,
    "hellinger": HELLINGER,
    "chi2": CHI2,
}


def divergence(view: View, kind: Divergence = KL) -> jax.Array:
    """D [...] of a view, in nats for the KLs; never negative by more than rounding, always finite."""
    term = kind.term(view.mu, view.pi, view.log_mu, view.log_pi)
    return jax.lax.stop_gradient(_sum(view, term))


def directional_derivative(view: View, kind: Divergence = KL) -> jax.Array:
    """D_dot [...]: rate of D along the logit direction onehot(k) - pi (module docstring; arXiv 2607.10848, eq. of D_dot)."""
    v = view.sampled - view.pi
    mean_v = _sum(view, view.pi * v)
    slope = kind.slope(view.mu, view.pi, view.log_mu, view.log_pi)
    return jax.lax.stop_gradient(_sum(view, slope * (v - mean_v[..., None])))


def exact_view(mu_logprobs: chex.Array, pi_logprobs: chex.Array, tokens: chex.Array) -> View:
    """All V tokens as slots.

    Args:
      mu_logprobs, pi_logprobs: float [..., V], normalised.
      tokens: int32 [...], the sampled ids.
    """
    chex.assert_equal_shape([mu_logprobs, pi_logprobs])
    chex.assert_shape(tokens, mu_logprobs.shape[:-1])
    sampled = tokens[..., None] == jnp.arange(mu_logprobs.shape[-1])
    return _view(mu_logprobs, pi_logprobs, jnp.ones_like(mu_logprobs), sampled)


def binary_view(mu_logprobs: chex.Array, pi_logprobs: chex.Array) -> View:
    """The two-point distribution {sampled token, every other}, from the sampled token's log-probs [...].

    1 - p is -expm1(log p), which keeps its digits where p is close to 1.
    """
    chex.assert_equal_shape([mu_logprobs, pi_logprobs])
    mu, pi = (jnp.stack([x, _log1mexp(x)], axis=-1) for x in (_wide(mu_logprobs), _wide(pi_logprobs)))
    sampled = jnp.broadcast_to(jnp.array([True, False]), mu.shape)
    return _view(mu, pi, jnp.ones_like(mu), sampled)


def topk_view(
    ids: chex.Array,
    mu_topk_logprobs: chex.Array,
    pi_topk_logprobs: chex.Array,
    tokens: chex.Array,
    mu_logprobs: chex.Array,
    pi_logprobs: chex.Array,
    vocab_size: int,
    *,
    tail: Tail = "aggregated",
    topk_set: TopKSet = "union",
) -> View:
    """The K most probable tokens of mu, the sampled one, and the rest as a tail.

    The tail holds 1 - sum over the set, clamped at 0: as one token ("aggregated") or spread evenly over the unseen
    tokens ("uniform"). It is empty where the set covers the vocabulary.

    Args:
      ids: int32 [..., K], sorted by falling mu.
      mu_topk_logprobs, pi_topk_logprobs: float [..., K], full-softmax log-probs at `ids`.
      tokens: int32 [...], sampled ids; counted once where they are among `ids`.
      mu_logprobs, pi_logprobs: float [...], log-probs of the sampled tokens.
      vocab_size: V.
      tail: model of the unseen tokens.
      topk_set: "union" adds the sampled token to the K (the papers); "replace" lets it take the last place instead
        (reference code; for reproduction only).

    Raises:
      ValueError: unknown `tail` or `topk_set`, or a vocabulary that is not given.
    """
    if tail not in ("aggregated", "uniform") or topk_set not in ("union", "replace"):
        raise ValueError(
            f"tail is {tail!r} (choose aggregated or uniform), topk_set is {topk_set!r} (choose union or replace)"
        )
    if vocab_size < 1:
        raise ValueError("a top-K view needs vocab_size, the number of tokens that the full softmax covers")
    chex.assert_equal_shape([ids, mu_topk_logprobs, pi_topk_logprobs])
    chex.assert_equal_shape([tokens, mu_logprobs, pi_logprobs])
    chex.assert_shape(tokens, ids.shape[:-1])
    mu, pi, mu_k, pi_k = map(_wide, (mu_topk_logprobs, pi_topk_logprobs, mu_logprobs, pi_logprobs))
    sampled = ids == tokens[..., None]
    present = jnp.any(sampled, axis=-1)
    if topk_set == "replace":
        last = (jnp.arange(ids.shape[-1]) == ids.shape[-1] - 1) & ~present[..., None]
        mu, pi = jnp.where(last, mu_k[..., None], mu), jnp.where(last, pi_k[..., None], pi)
        sampled, count = sampled | last, jnp.ones_like(mu)
        unseen = jnp.full(tokens.shape, vocab_size - ids.shape[-1])
    else:
        mu = jnp.concatenate([mu, mu_k[..., None]], axis=-1)
        pi = jnp.concatenate([pi, pi_k[..., None]], axis=-1)
        sampled = jnp.concatenate([sampled, ~present[..., None]], axis=-1)
        count = jnp.concatenate([jnp.ones_like(mu[..., :-1]), ~present[..., None]], axis=-1)
        unseen = vocab_size - ids.shape[-1] - ~present
    unseen = jnp.maximum(unseen, 0).astype(mu.dtype)
    tokens_in_tail = jnp.minimum(unseen, 1.0) if tail == "aggregated" else unseen

    def tail_logprob(logprobs):
        rest = jnp.maximum(1.0 - jnp.sum(count * jnp.exp(logprobs), axis=-1), 0.0)
        return jnp.log(rest / jnp.maximum(tokens_in_tail, 1.0))[..., None]

    return _view(
        jnp.concatenate([mu, tail_logprob(mu)], axis=-1),
        jnp.concatenate([pi, tail_logprob(pi)], axis=-1),
        jnp.concatenate([count, tokens_in_tail[..., None]], axis=-1),
        jnp.concatenate([sampled, jnp.zeros_like(sampled[..., :1])], axis=-1),
    )


def _view(log_mu, log_pi, count, sampled) -> View:
    log_mu, log_pi = jax.lax.stop_gradient((_wide(log_mu), _wide(log_pi)))
    return View(
        log_mu=jnp.clip(log_mu, LOG_FLOOR, 0.0),
        log_pi=jnp.clip(log_pi, LOG_FLOOR, 0.0),
        mu=jnp.exp(jnp.minimum(log_mu, 0.0)),
        pi=jnp.exp(jnp.minimum(log_pi, 0.0)),
        count=count.astype(log_mu.dtype),
        sampled=sampled,
    )


def _sum(view: View, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(view.count > 0, view.count * x, 0.0), axis=-1)


def _log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - e^x) for x <= 0; -inf at 0."""
    x = jnp.minimum(x, 0.0)
    near_zero = x > -0.6931472
    return jnp.where(
        near_zero,
        jnp.log(-jnp.expm1(jnp.where(near_zero, x, -1.0))),
        jnp.log1p(-jnp.exp(jnp.where(near_zero, -1.0, x))),
    )


def _wide(x: chex.Array) -> jax.Array:
    return jnp.asarray(x).astype(jnp.promote_types(x.dtype, jnp.float32))
