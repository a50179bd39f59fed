"""Names of the objectives, what each needs, and its defaults. A new objective is one function and one line here.

An objective is a function of `Tokens` whose keyword-only arguments are its hyperparameters: their annotations are the
configuration's schema and their defaults its defaults. See docs/new_objective.md.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.objectives import mask, output_reset, ratio, regularizer
from jaxrl_llm.objectives.inputs import TokenLoss


@dataclasses.dataclass(frozen=True)
class Objective:
    """One row of the table.

    Attributes:
      function: (Tokens, **hyperparameters) -> TokenLoss.
      anchor: default policy of the ratio's denominator, "behavior" or "old".
      advantage: advantage estimator that it is published with.
      aggregation: aggregation that it is published with.
      normalize_std: whether its group advantages are divided by the group's standard deviation.
      needs: hyperparameters -> statistics that it needs beyond log-probs.
      defaults: hyperparameters that differ from the function's own defaults.
    """

    function: Callable[..., TokenLoss]
    anchor: str = "behavior"
    advantage: str = "group"
    aggregation: str = "token_mean"
    normalize_std: bool = True
    needs: Callable[[Any], frozenset[str]] = lambda hyper: frozenset()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def schema(self) -> type:
        """A frozen dataclass of the hyperparameters."""
        hints = typing.get_type_hints(self.function)
        fields = [
            (name, hints[name], dataclasses.field(default=self.defaults.get(name, parameter.default)))
            for name, parameter in inspect.signature(self.function).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        return dataclasses.make_dataclass(self.function.__name__, fields, frozen=True)


def _dppo_needs(hyper) -> frozenset[str]:
    return frozenset({"topk_logprobs"} if hyper.divergence.startswith("topk") else ())


def _pdm_needs(hyper) -> frozenset[str]:
    return frozenset({"topk_logprobs"} if hyper.view != "binary" else ())


def _drpo(name: str, **defaults) -> Objective:
    return Objective(
        regularizer.drpo, normalize_std=False, defaults=defaults | ({} if name == "shift" else {"regularizer": name})
    )


OBJECTIVES: dict[str, Objective] = {
    "reinforce": Objective(ratio.reinforce),
    "pg_is": Objective(ratio.pg_is),
    "ppo_clip": Objective(ratio.ppo_clip, advantage="gae"),
    "grpo": Objective(ratio.ppo_clip, aggregation="seq_mean_token_mean"),
    "dr_grpo": Objective(ratio.ppo_clip, aggregation="seq_sum_constant", normalize_std=False),
    "dapo": Objective(ratio.ppo_clip, defaults={"eps_high": 0.28}),
    "gspo": Objective(ratio.gspo, aggregation="seq_mean_token_mean"),
    "cispo": Objective(ratio.cispo),
    "spo": Objective(regularizer.spo),
    "dppo": Objective(mask.dppo, normalize_std=False, needs=_dppo_needs),
    "pdm": Objective(mask.pdm, normalize_std=False, needs=_pdm_needs),
    "drpo": _drpo("shift"),
    "drpo_unweighted": _drpo("shift", advantage_weighted=False),
    "drpo_chi2": _drpo("chi2"),
    "drpo_kl": _drpo("kl"),
    "drpo_tv": _drpo("tv"),
    "mask_drpo": _drpo("mask"),
    "ppo_or": Objective(output_reset.output_reset, anchor="old", advantage="gae"),
    "grpo_or": Objective(output_reset.output_reset, anchor="old", aggregation="seq_mean_token_mean"),
}
