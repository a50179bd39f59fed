"""Names of the objectives, what each needs, and its defaults. A new objective is one function and one line here.

An objective is a function of `Tokens` whose keyword-only arguments are its hyperparameters: their annotations are the
configuration's schema and their defaults its defaults. See docs/new_objective.md.
One that is written outside the package is named by its import path, "my_lab.losses:huber".
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from jaxrl_llm import plugins, schema
from jaxrl_llm.objectives import mask, output_reset, ratio, regularizer
from jaxrl_llm.objectives.aggregate import MODES
from jaxrl_llm.objectives.inputs import TokenLoss

# What an objective may ask for beyond log-probs, and the sections that no block may be called after.
STATISTICS = frozenset({"topk_logprobs", "entropy", "old_logprobs", "reference_logprobs"})
SECTIONS = frozenset({"name", "anchor", "correction", "penalty", "aggregation"})


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
        return plugins.settings(self.function, "config.objective.name", arguments=1, defaults=self.defaults)


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

BUILT_IN = frozenset(OBJECTIVES)


def objective(
    name: str,
    *,
    anchor: str = "behavior",
    advantage: str = "group",
    aggregation: str = "token_mean",
    normalize_std: bool = True,
    needs: Iterable[str] | Callable[[Any], Iterable[str]] = (),
) -> Callable[[Callable[..., TokenLoss]], Callable[..., TokenLoss]]:
    """Decorator that registers an objective under `name`; the fields are those of `Objective`.

    Args:
      needs: statistics beyond log-probs (`STATISTICS`), or a function of the hyperparameters that gives them.

    Raises:
      ValueError: the name is taken, a field has an unknown value, or the signature cannot be a schema.
    """
    field = f"objective {name!r}"
    schema.require(anchor in ("behavior", "old"), f"{field}: anchor", anchor, "'behavior' or 'old'")
    schema.require(aggregation in MODES, f"{field}: aggregation", aggregation, f"one of {', '.join(MODES)}")
    if not callable(needs):
        needs = frozenset((needs,) if isinstance(needs, str) else needs)
        schema.require(needs <= STATISTICS, f"{field}: needs", sorted(needs), f"among {', '.join(sorted(STATISTICS))}")

    def mark(function: Callable[..., TokenLoss]) -> Callable[..., TokenLoss]:
        asked = (lambda hyper: frozenset(needs(hyper))) if callable(needs) else (lambda hyper: needs)
        row = Objective(function, anchor, advantage, aggregation, normalize_std, asked)
        plugins.settings(function, field, arguments=1)
        plugins.register(OBJECTIVES, name, row, function, "objective")
        return function

    return mark


def find(name: str) -> Objective:
    """The objective of that name or import path; a plain function's row has every field's default.

    Raises:
      ValueError: there is none, or it cannot be an objective; says why.
    """
    field = "config.objective.name"
    if not plugins.is_path(name):
        return schema.choose(OBJECTIVES, name, f"objective {field}")
    function = plugins.resolve(name, field)
    block = plugins.block(name)
    for registered, row in OBJECTIVES.items():
        if row.function is function and registered not in BUILT_IN:
            return row
    schema.require(
        block not in BUILT_IN | SECTIONS, field, name, f"a function of another name: {block!r} is the package's own"
    )
    return _plain(function)


def registered_by(modules: Iterable[ModuleType]) -> dict[str, Objective]:
    """The objectives that functions of `modules` were registered as."""
    modules = tuple(modules)
    return {name: row for name, row in OBJECTIVES.items() if plugins.made_in(row.function, modules)}


@functools.cache
def _plain(function: Callable[..., TokenLoss]) -> Objective:
    return Objective(function)
