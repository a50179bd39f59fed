"""The configuration of a run: what can be set, what it means, and what is refused.

In comes an ml_collections ConfigDict from a file under `configs/`, changed by the command line; out goes a `RunConfig`, plain
frozen dataclasses in which every value and combination has been checked. Nothing is compiled and no file is read here.
"""

from jaxrl_llm.config.run import RunConfig, check, check_devices, check_model, default_config
from jaxrl_llm.config.sections import (
    Advantage,
    Checkpoint,
    Critic,
    Diagnostics,
    EarlyStop,
    Evaluation,
    Fp8,
    Mesh,
    Model,
    Optimizer,
    ReferenceKL,
    RewardModel,
    Rollout,
    Training,
    WarmStart,
)

__all__ = [
    "Advantage",
    "Checkpoint",
    "Critic",
    "Diagnostics",
    "EarlyStop",
    "Evaluation",
    "Fp8",
    "Mesh",
    "Model",
    "Optimizer",
    "ReferenceKL",
    "RewardModel",
    "Rollout",
    "RunConfig",
    "Training",
    "WarmStart",
    "check",
    "check_devices",
    "check_model",
    "default_config",
]
