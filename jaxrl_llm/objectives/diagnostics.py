"""Was the mask right? Verdicts of the two direction criteria against what an optimizer step really did to the divergence.

The direction autopsy of the PDM paper (arXiv 2607.10848): around one optimizer step on a fixed batch, every token outside the
trust region gets two verdicts, keep or drop, and its divergence really grows or shrinks. Where the verdicts differ, count

    unsafe-keep rate       share of kept updates whose divergence grew             (lower is better)
    contraction-keep rate  share of really contracting updates that were kept      (higher is better)
"""

import chex
import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.objectives.inputs import Metric


@flax.struct.dataclass
class Verdicts:
    """Which tokens each criterion keeps.

    Attributes:
      outside: bool [B, T], counted tokens with A != 0 and D > delta.
      ratio: bool [B, T], kept by the ratio criterion: not A (r - 1) > 0.
      predictive: bool [B, T], kept by the predictive criterion: not A D_dot > 0.
    """

    outside: jax.Array
    ratio: jax.Array
    predictive: jax.Array


def verdicts(
    divergence: chex.Array,
    directional_derivative: chex.Array,
    ratio: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    delta: float,
) -> Verdicts:
    """Both criteria's verdicts; all arrays [B, T], the boundary (D = delta, r = 1, D_dot = 0) is kept."""
    chex.assert_equal_shape([divergence, directional_derivative, ratio, advantages, mask])
    return Verdicts(
        outside=mask & (advantages != 0) & (divergence > delta),
        ratio=~(advantages * (ratio - 1) > 0),
        predictive=~(advantages * directional_derivative > 0),
    )


def autopsy(seen: Verdicts, before: chex.Array, after: chex.Array) -> dict[str, Metric]:
    """The rates over tokens where the criteria disagree, as means in the making.

    Args:
      seen: verdicts before the step.
      before, after: float [B, T], exact divergence of each token before and after the optimizer step.

    Returns:
      unsafe_keep and contraction_keep of both criteria, the share of outside tokens on which they disagree, and the
      token counts behind each rate (`*_tokens`), so that rates of several steps can be pooled.
    """
    chex.assert_equal_shape([seen.outside, before, after])
    disputed = seen.outside & (seen.ratio != seen.predictive)
    change = jnp.where(seen.outside, after - before, 0.0)

    def share(of, among):
        return Metric(jnp.sum(of & among).astype(jnp.float32), jnp.sum(among).astype(jnp.float32))

    def count(of):
        return Metric(jnp.sum(of).astype(jnp.float32), jnp.float32(1.0))

    shrank = disputed & (change < 0)
    rates = {
        "autopsy/disagree": share(disputed, seen.outside),
        "autopsy/outside_tokens": count(seen.outside),
        "autopsy/shrank_tokens": count(shrank),
    }
    for name, kept in (("ratio", seen.ratio), ("predictive", seen.predictive)):
        rates[f"autopsy/{name}/unsafe_keep"] = share(change > 0, disputed & kept)
        rates[f"autopsy/{name}/kept_tokens"] = count(disputed & kept)
        rates[f"autopsy/{name}/contraction_keep"] = share(kept, shrank)
    return rates
