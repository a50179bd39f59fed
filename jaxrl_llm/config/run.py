"""The whole configuration of a run as frozen dataclasses, and every check that can be made before anything compiles.

A config file (`configs/*.py`) starts from `default_config()`, an ml_collections ConfigDict, and changes fields.
`RunConfig.read` turns the ConfigDict back into dataclasses and refuses what cannot work, naming the field.
The sections `task` and `objective` belong to their rooms, which check them themselves.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_collections

from jaxrl_llm import objectives, schema, tasks
from jaxrl_llm.config import suggest
from jaxrl_llm.config.sections import (
    Advantage,
    Checkpoint,
    Critic,
    Diagnostics,
    EarlyStop,
    Evaluation,
    Mesh,
    Model,
    Optimizer,
    ReferenceKL,
    RewardModel,
    Rollout,
    Training,
    WarmStart,
)
from jaxrl_llm.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run. See the sections' docstrings for the fields.

    Attributes:
      run_dir: where everything the run leaves is written.
      seed: of parameters, data order and sampling.
    """

    run_dir: str = "runs/default"
    seed: int = 0
    model: Model = dataclasses.field(default_factory=Model)
    task: Mapping = dataclasses.field(default_factory=tasks.default_config)
    rollout: Rollout = dataclasses.field(default_factory=Rollout)
    objective: Mapping = dataclasses.field(default_factory=objectives.default_config)
    advantage: Advantage = dataclasses.field(default_factory=Advantage)
    critic: Critic = dataclasses.field(default_factory=Critic)
    kl: ReferenceKL = dataclasses.field(default_factory=ReferenceKL)
    reward_model: RewardModel = dataclasses.field(default_factory=RewardModel)
    diagnostics: Diagnostics = dataclasses.field(default_factory=Diagnostics)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    training: Training = dataclasses.field(default_factory=Training)
    warm_start: WarmStart = dataclasses.field(default_factory=WarmStart)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    early_stop: EarlyStop = dataclasses.field(default_factory=EarlyStop)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "RunConfig":
        """Reads and checks a ConfigDict or mapping; see `check`."""
        if isinstance(config, ml_collections.ConfigDict):
            config = config.to_dict()
        try:
            run = schema.read(cls, config, "config")
            check(run)
        except schema.UnknownField as error:
            raise ValueError(suggest.unknown_field(error.path, schema.defaults(cls()))) from None
        return run

    @property
    def sequences(self) -> int:
        """Sequences per rollout (B)."""
        return self.rollout.prompts * self.rollout.group_size

    @property
    def estimator(self) -> str:
        """The advantage estimator, the objective's own resolved."""
        own = objectives.find(self.objective["name"]).advantage
        return own if self.advantage.name == "default" else self.advantage.name

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the RL phase."""
        return self.training.rollouts * self.training.updates_per_rollout * self.training.epochs


def default_config() -> ml_collections.ConfigDict:
    """Every field with its default, for a config file to change."""
    return ml_collections.ConfigDict(schema.defaults(RunConfig()))


def check(run: RunConfig) -> None:
    """Refuses values and combinations that cannot work.

    Raises:
      ValueError: names the field, its value and what would be right.
    """
    r, t, require = run.rollout, run.training, schema.require
    for section, names in _POSITIVE.items():
        for name in names:
            value = getattr(getattr(run, section), name)
            require(value > 0, f"config.{section}.{name}", value, "positive")
    for section, names in _NOT_NEGATIVE.items():
        for name in names:
            value = getattr(getattr(run, section), name)
            require(value >= 0, f"config.{section}.{name}", value, "0 or more")
    require(0 < r.top_p <= 1, "config.rollout.top_p", r.top_p, "in (0, 1]")
    require(0 <= r.min_p < 1, "config.rollout.min_p", r.min_p, "in [0, 1)")
    require(0 < run.evaluation.top_p <= 1, "config.evaluation.top_p", run.evaluation.top_p, "in (0, 1]")
    require(
        r.temperature > 0,
        "config.rollout.temperature",
        r.temperature,
        "above 0: a greedy sampler has no importance ratio (config.evaluation.temperature may be 0)",
    )
    require(
        run.sequences % t.updates_per_rollout == 0,
        "config.training.updates_per_rollout",
        t.updates_per_rollout,
        f"a divisor of the {run.sequences} sequences of a rollout (rollout.prompts x rollout.group_size)",
    )
    minibatch = run.sequences // t.updates_per_rollout
    require(
        minibatch % t.micro_batches == 0,
        "config.training.micro_batches",
        t.micro_batches,
        f"a divisor of the mini-batch's {minibatch} sequences",
    )
    require(
        t.autopsy_delta == 0 or r.capture_top_k > 0,
        "config.rollout.capture_top_k",
        r.capture_top_k,
        "positive: config.training.autopsy_delta compares top-K distributions",
    )
    share = run.early_stop.truncated_above
    require(0 <= share <= 1, "config.early_stop.truncated_above", share, "in [0, 1]")
    loss = objectives.build(run.objective)
    require(
        r.refill_rounds == 0 or (r.group_size > 1 and run.estimator in ("group", "rloo")),
        "config.rollout.refill_rounds",
        r.refill_rounds,
        "0 unless rewards are compared within groups: config.rollout.group_size above 1, config.advantage.name"
        " 'group' or 'rloo'",
    )
    require(0 <= run.critic.gamma <= 1, "config.critic.gamma", run.critic.gamma, "in [0, 1]")
    require(0 <= run.critic.lam <= 1, "config.critic.lam", run.critic.lam, "in [0, 1]")
    require(
        run.kl.target == 0 or run.kl.reward > 0 or loss.penalty.kl > 0,
        "config.kl.target",
        run.kl.target,
        "0 where neither kl.reward nor objective.penalty.kl gives a coefficient to steer",
    )
    if "topk_logprobs" in loss.needs:
        require(
            r.capture_top_k > 0,
            "config.rollout.capture_top_k",
            r.capture_top_k,
            f"positive: objective {run.objective['name']!r} compares top-K distributions (the papers use 20)",
        )


def check_model(run: RunConfig, model: ModelConfig) -> None:
    """Checks what depends on the model: K and top_k against the vocabulary, experts to replay."""
    replay = run.rollout.routing_replay
    schema.require(
        bool(model.num_moe_layers) or not replay,
        "config.rollout.routing_replay",
        replay,
        "False: the model has no experts",
    )
    for name in ("capture_top_k", "top_k"):
        value = getattr(run.rollout, name)
        schema.require(
            value <= model.vocab_size,
            f"config.rollout.{name}",
            value,
            f"at most the vocabulary's size, {model.vocab_size}",
        )


def check_devices(run: RunConfig, data_shards: int) -> None:
    """Checks that every batch divides over the devices that share the batch axis."""
    minibatch = run.sequences // run.training.updates_per_rollout
    micro = minibatch // run.training.micro_batches
    schema.require(
        micro % data_shards == 0,
        "config.training.micro_batches",
        run.training.micro_batches,
        f"such that a micro-batch ({micro} sequences now) divides over mesh.data x mesh.fsdp = {data_shards} devices",
    )


_POSITIVE = {
    "rollout": ("prompts", "group_size", "max_prompt_length", "max_response_length"),
    "training": ("rollouts", "updates_per_rollout", "epochs", "micro_batches"),
    "optimizer": ("learning_rate",),
    "warm_start": ("batch_size", "learning_rate"),
    "critic": ("learning_rate",),
    "reward_model": ("batch_size", "held_out_pairs", "max_length"),
    "evaluation": ("samples",),
    "checkpoint": ("every", "keep"),
}
_NOT_NEGATIVE = {
    "training": ("autopsy_delta",),
    "rollout": ("top_k", "capture_top_k", "slots", "refill_rounds", "staleness"),
    "optimizer": ("warmup_steps", "weight_decay", "max_grad_norm"),
    "warm_start": ("steps",),
    "critic": ("clip",),
    "kl": ("reward", "target", "rate"),
    "reward_model": ("clip",),
    "diagnostics": ("margin",),
    "evaluation": ("every", "prompts", "temperature"),
    "early_stop": ("rollouts", "entropy_below"),
}
