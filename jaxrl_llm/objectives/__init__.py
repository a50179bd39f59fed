"""Policy objectives for LLM reinforcement learning, as pure functions of per-token arrays.

Three axes explain the family:

    proximity   how far is too far?        binary | top-K | exact distribution, in TV or KL   divergence.py
    direction   does the step lead out?    the sampled ratio | the divergence's derivative    mask.py
    action      what happens then?         mask | clip | quadratic | margin                   mask.py, ratio.py,
                                                                                              regularizer.py, output_reset.py

    DPPO = top-K KL . ratio      . mask
    PDM  = top-K KL . predictive . mask
    DRPO = binary TV . ratio     . quadratic

`build(config)` composes an objective with corrections (correction.py), penalties (penalty.py) and an aggregation
(aggregate.py); `advantage.py` makes advantages from rewards, `value.py` and
`preference.py` hold the losses of a critic and of a reward model. This package imports nothing of jaxrl_llm but its
configuration reader and the finder of functions outside the package.
"""

from jaxrl_llm.objectives.advantage import (
    gae,
    group_advantages,
    reinforce_plus_plus_advantages,
    rloo_advantages,
    terminal_rewards,
)
from jaxrl_llm.objectives.inputs import LossInputs, LossTerms, Metric, TokenLoss, Tokens, across, add, divide, sanitize
from jaxrl_llm.objectives.loss import PolicyLoss, build, default_config
from jaxrl_llm.objectives.output_reset import margin_diagnostics
from jaxrl_llm.objectives.preference import bradley_terry
from jaxrl_llm.objectives.registry import BUILT_IN, OBJECTIVES, Objective, find, objective
from jaxrl_llm.objectives.value import explained_variance, value_loss, whiten
from jaxrl_llm.objectives.weight import effective_weight

__all__ = [
    "BUILT_IN",
    "OBJECTIVES",
    "LossInputs",
    "LossTerms",
    "Metric",
    "Objective",
    "PolicyLoss",
    "TokenLoss",
    "Tokens",
    "across",
    "add",
    "bradley_terry",
    "build",
    "default_config",
    "divide",
    "effective_weight",
    "explained_variance",
    "find",
    "gae",
    "group_advantages",
    "margin_diagnostics",
    "objective",
    "reinforce_plus_plus_advantages",
    "rloo_advantages",
    "sanitize",
    "terminal_rewards",
    "value_loss",
    "whiten",
]
