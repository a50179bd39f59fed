"""Policy gradients with importance ratios, and the PPO family that clips them.

`r = pi_k / mu_k` on the sampled token is all that these objectives know of the distance between the policies.
Choose one of them as a baseline; on large vocabularies the ratio over-restricts rare tokens and under-restricts common
ones, which the divergence masks and regularisers of the sibling modules address.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.objectives.inputs import LOG_RATIO_BOUND, TokenLoss, Tokens, divide


def reinforce(t: Tokens) -> TokenLoss:
    """-A log pi [B, T] (Williams 1992). With A = 1 it is supervised learning.

    Choose it where every token was drawn from the current policy; off-policy it is biased.
    """
    return TokenLoss(-t.advantages * t.logprobs)


def pg_is(t: Tokens, *, ratio_cap: float = 0.0) -> TokenLoss:
    """-A r [B, T], the importance-weighted policy gradient without any trust region.

    Choose it as the control of a study: whatever a trust region gains, it gains over this.
    """
    return TokenLoss(surrogate(t, ratio_cap))


def ppo_clip(t: Tokens, *, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float = 0.0) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)) [B, T] (Schulman 2017, eq. 7).

    Choose it as the baseline that everyone knows. Over a large vocabulary it stops rare tokens early (r moves far while
    their probability hardly does) and common ones late.

    Args:
      t: tokens.
      eps_low, eps_high: ratio bounds; unequal ones are DAPO's clip-higher (arXiv 2503.14476).
      dual_clip: c > 1 bounds the loss by -A c where A < 0 (Ye 2020); 0 for none.
    """
    return _clipped(t, t.ratio, eps_low, eps_high, dual_clip)


def gspo(t: Tokens, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> TokenLoss:
    """PPO's clip on the geometric mean of a sequence's ratios (Zheng 2025, arXiv 2507.18071, eq. 7).

    Every token of a row carries the sequence's loss, so a sequence-mean aggregation gives the paper's objective.
    Choose it for mixture-of-experts policies, whose single tokens' ratios jump when the routing does.
    """
    mean = divide(jnp.sum(jnp.where(t.mask, t.log_ratio, 0.0), axis=-1), jnp.sum(t.mask, axis=-1))
    ratio = jnp.exp(jnp.clip(mean, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))[:, None]
    return _clipped(t, jnp.broadcast_to(ratio, t.ratio.shape), eps_low, eps_high, 0.0)


def cispo(t: Tokens, *, eps_low: float = 1.0, eps_high: float = 2.0) -> TokenLoss:
    """-A sg(clip(r, 1 - eps_low, 1 + eps_high)) log pi (MiniMax 2025, arXiv 2506.13585, eq. 4).

    The ratio is a bounded weight, no token loses its gradient. The defaults bound it from above only, at 3.
    Choose it where rare tokens that start a reflection must keep learning.
    """
    weight = jnp.clip(t.ratio, 1 - eps_low, 1 + eps_high)
    return TokenLoss(-t.advantages * jax.lax.stop_gradient(weight) * t.logprobs)


def surrogate(t: Tokens, ratio_cap: float) -> jax.Array:
    """-A r; with a cap C > 0 the weight is min(r, C), constant, and the gradient goes through log pi."""
    if ratio_cap == 0:
        return -t.advantages * t.ratio
    return -t.advantages * jax.lax.stop_gradient(jnp.minimum(t.ratio, ratio_cap)) * t.logprobs


def _clipped(t: Tokens, ratio, eps_low, eps_high, dual_clip) -> TokenLoss:
    plain = -t.advantages * ratio
    clipped = -t.advantages * jnp.clip(ratio, 1 - eps_low, 1 + eps_high)
    loss, kept = jnp.maximum(plain, clipped), plain >= clipped
    if dual_clip > 0:
        bound = -t.advantages * dual_clip
        active = (t.advantages < 0) & (loss > bound)
        loss, kept = jnp.where(active, bound, loss), kept & ~active
    return TokenLoss(loss, kept)
