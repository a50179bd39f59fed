"""An objective with its corrections, penalties and aggregation, built from configuration: `build(config)(inputs)`."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm import plugins, schema
from jaxrl_llm.objectives import correction, outside, penalty
from jaxrl_llm.objectives.aggregate import Mode, aggregate
from jaxrl_llm.objectives.correction import Correction
from jaxrl_llm.objectives.inputs import (
    LossInputs,
    LossTerms,
    Metric,
    TokenLoss,
    Tokens,
    exp_excess,
    masked_mean,
    sanitize,
)
from jaxrl_llm.objectives.penalty import Penalty
from jaxrl_llm.objectives.registry import BUILT_IN, OBJECTIVES, SECTIONS, find, registered_by


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """How per-token losses become one number.

    Attributes:
      mode: see `aggregate.aggregate`; "default" takes the objective's own.
      horizon: tokens that seq_sum_constant divides by.
      denominator: "original" counts every token of the mask; "kept" leaves out what a correction rejected, penalties
        included. A token whose gradient an objective clips or masks is not rejected: it stays in both.
    """

    mode: Literal["default", "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"] = "default"
    horizon: int = 1024
    denominator: Literal["original", "kept"] = "original"

    def __post_init__(self):
        schema.require(self.horizon > 0, "aggregation.horizon", self.horizon, "positive")


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """A policy objective, ready to use under jit. Hashable: every field is static.

    Attributes:
      name: of the objective.
      hyper: its hyperparameters.
      anchor: policy in the ratio's denominator.
      mode: aggregation.
    """

    name: str
    hyper: Any
    anchor: str
    mode: Mode
    aggregation: Aggregation
    correction: Correction
    penalty: Penalty

    @property
    def needs(self) -> frozenset[str]:
        """Statistics to compute beyond the log-probs: topk_logprobs, entropy, old_logprobs, reference_logprobs."""
        old = frozenset({"old_logprobs"} if self.anchor == "old" else ())
        return find(self.name).needs(self.hyper) | old | self.correction.needs | self.penalty.needs

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        """The objective alone, per token, before corrections, penalties and aggregation."""
        return find(self.name).function(tokens, **plugins.values(self.hyper))

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Numerator, denominator and metrics of a batch; see `LossTerms`. Differentiable in `logprobs` and `entropy`.

        Raises:
          ValueError: a statistic in `needs` is missing.
        """
        for name in sorted(self.needs):
            if getattr(inputs, name) is None:
                raise ValueError(f"objective {self.name!r} needs {name}, which is missing from its inputs")
        t = sanitize(inputs, self.anchor)
        answer = self.token_loss(t)
        weights, trusted = correction.apply(self.correction, t)
        extra, penalties = penalty.apply(self.penalty, t)
        loss = jnp.where(trusted, answer.loss * weights, 0.0) + extra
        kept = trusted if answer.kept is None else trusted & answer.kept
        counted = t.mask & trusted if self.aggregation.denominator == "kept" else t.mask
        numerator, denominator = aggregate(loss, counted, self.mode, self.aggregation.horizon)
        return LossTerms(
            numerator=numerator,
            denominator=jax.lax.stop_gradient(denominator),
            metrics=_metrics(t, answer.metrics | penalties, kept),
            maxima={"ratio/max_abs_log": jnp.max(jnp.where(t.mask, jnp.abs(t.log_ratio), 0.0), initial=0.0)},
        )


def build(config: Mapping[str, Any]) -> PolicyLoss:
    """The loss that a configuration names.

    Args:
      config: as `default_config()`; only the block of the named objective is used, so that changing `name` alone
        switches objectives.

    Raises:
      ValueError: unknown objective, block or hyperparameter, or a value of another type; names it and the choices.
    """
    config = dict(config)
    name = config.get("name", "grpo")
    objective, block = find(name), plugins.block(name)
    known = {block, *SECTIONS, *OBJECTIVES}
    for key in config:
        if key not in known:
            raise schema.UnknownField(f"config.objective.{key}", known)
    anchor = config.get("anchor", "default")
    if anchor not in ("default", "behavior", "old"):
        raise ValueError(f"config.objective.anchor is {anchor!r}; choose from: default, behavior, old")
    aggregation = schema.read(Aggregation, config.get("aggregation", {}), "config.objective.aggregation")
    correct = schema.read(Correction, config.get("correction", {}), "config.objective.correction")
    if correct.weight != "none" and anchor == "behavior":
        # The weight is pi_old / mu: beside a ratio over mu it would count the mismatch twice.
        raise ValueError(
            f"config.objective.correction.weight {correct.weight!r} weighs by pi_old / mu and goes with the ratio over"
            " pi_old; config.objective.anchor is 'behavior', it must be 'old' or 'default'"
        )
    if anchor == "default":
        anchor = objective.anchor if correct.weight == "none" else "old"
    loss = PolicyLoss(
        name=name,
        hyper=schema.read(objective.schema, config.get(block, {}), f"config.objective.{block}"),
        anchor=anchor,
        mode=objective.aggregation if aggregation.mode == "default" else aggregation.mode,
        aggregation=aggregation,
        correction=correct,
        penalty=schema.read(Penalty, config.get("penalty", {}), "config.objective.penalty"),
    )
    if name not in BUILT_IN:
        outside.check(loss)
    return loss


def default_config(modules: Iterable[ModuleType] = ()) -> dict[str, Any]:
    """Hyperparameters of the package's objectives and of those that `modules` registered, and the shared sections.

    As nested plain dicts, for a configuration file.
    """
    rows = {name: OBJECTIVES[name] for name in OBJECTIVES if name in BUILT_IN} | registered_by(modules)
    blocks = {name: schema.defaults(objective.schema()) for name, objective in rows.items()}
    shared = {
        "correction": schema.defaults(Correction()),
        "penalty": schema.defaults(Penalty()),
        "aggregation": schema.defaults(Aggregation()),
    }
    return {"name": "grpo", "anchor": "default", **shared, **blocks}


def _metrics(t: Tokens, values: dict[str, jax.Array], kept: jax.Array) -> dict[str, Metric]:
    # Tokens with A = 0 contribute nothing and are left out of the shares.
    active = t.mask & (t.advantages != 0)
    shares = {
        "mask/share": masked_mean(~kept, active),
        "mask/share_positive": masked_mean(~kept, active & (t.advantages > 0)),
        "mask/share_negative": masked_mean(~kept, active & (t.advantages < 0)),
    }
    ratios = {
        "ratio/mean": t.ratio,
        "ratio/abs_log": jnp.abs(t.log_ratio),
        "ratio/k1": -t.log_ratio,
        "ratio/k3": exp_excess(t.log_ratio),
        "ratio/k3_reverse": exp_excess(-t.log_ratio),
        "ratio/abs_shift": jnp.abs(jnp.exp(t.logprobs) - jnp.exp(t.anchor_logprobs)),
        "ratio/missing_behavior": t.missing,
    }
    if t.raw.entropy is not None:
        ratios["entropy"] = t.raw.entropy
    return shares | {name: masked_mean(value, t.mask) for name, value in (ratios | values).items()}
