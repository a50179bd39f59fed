"""The whole configuration of a run as frozen dataclasses, and every check that can be made before anything compiles.

A config file (`configs/*.py`) starts from `default_config()`, an ml_collections ConfigDict, and changes fields.
`RunConfig.read` turns the ConfigDict back into dataclasses and refuses what cannot work, naming the field.
The sections `task` and `objective` belong to their rooms, which check them themselves.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import ml_collections

from jaxrl_llm import objectives, schema, tasks
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.ops.fp8 import Fp8Sites


@dataclasses.dataclass(frozen=True)
class Model:
    """The policy. With `source` empty it is made from `architecture` with random weights, else loaded.

    Attributes:
      source: directory or hub id of a Hugging Face checkpoint (safetensors), or a .gguf file; "" for random weights.
      architecture: fields of `models.config.ModelConfig` that differ from its defaults; used without a source.
      dtype: dtype of the computation; parameters are held in `param_dtype`.
      param_dtype: dtype of the master parameters.
      remat: what the backward pass recomputes.
    """

    source: str = ""
    architecture: Mapping = dataclasses.field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "dots", "full"] = "none"


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Emulated FP8 (SPEC section 7).

    Attributes:
      scope: who computes with the sites below: the sampler alone, or the trainer's forward too.
      logits, weights, activations, kv_cache: number format of each site.
      weight_scale: granularity of the weights' scales.
    """

    scope: Literal["rollout_only", "end_to_end"] = "rollout_only"
    logits: Literal["off", "e4m3", "e5m2"] = "off"
    weights: Literal["off", "e4m3", "e5m2"] = "off"
    activations: Literal["off", "e4m3", "e5m2"] = "off"
    kv_cache: Literal["off", "e4m3", "e5m2"] = "off"
    weight_scale: Literal["channel", "block"] = "channel"

    @property
    def sites(self) -> Fp8Sites:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "scope"}
        return Fp8Sites(**fields)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """How the behaviour policy samples.

    Attributes:
      prompts: prompts per rollout.
      group_size: samples per prompt (G).
      temperature, top_k, top_p, min_p: token choice; top_k 0, top_p 1, min_p 0 keep everything.
      max_prompt_length: longer prompts are dropped with a count.
      max_response_length: a response that reaches it without an end token is truncated.
      capture_top_k: K of the recorded top-K view of the behaviour policy; 0 records none.
      routing_replay: the trainer sends every token through the experts that the sampler's routers chose
        (arXiv 2510.11370), so that no change of expert comes between the two.
      slots: sequences decoded at once (continuous batching); 0 for all of them.
      refill_rounds: dynamic sampling: groups of equal rewards are replaced by other prompts' groups, with at most so many
        further rounds of `prompts` prompts; what is still missing then is left out of the loss. 0 keeps such groups.
      staleness: rollouts by which the sampling parameters lag behind; from 1 on, sampling overlaps with the updates. The
        lagging parameters are held in memory and in the checkpoints.
    """

    prompts: int = 32
    group_size: int = 8
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_prompt_length: int = 64
    max_response_length: int = 64
    capture_top_k: int = 0
    routing_replay: bool = False
    slots: int = 0
    refill_rounds: int = 0
    staleness: int = 0
    fp8: Fp8 = dataclasses.field(default_factory=Fp8)


@dataclasses.dataclass(frozen=True)
class Advantage:
    """How rewards become advantages.

    Attributes:
      name: estimator; "default" takes the one the objective is published with.
      normalize_std: divide group advantages by the group's standard deviation (Dr. GRPO does not).
    """

    name: Literal["default", "group", "rloo", "reinforce_plus_plus", "gae"] = "default"
    normalize_std: bool = True


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW with a schedule, after clipping by the global norm.

    Attributes:
      learning_rate: peak.
      schedule: shape after the warm-up, over the run's optimizer steps.
      warmup_steps: optimizer steps of linear warm-up.
      max_grad_norm: global-norm clip; 0 for none.
    """

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class Training:
    """How a rollout becomes updates.

    Attributes:
      rollouts: rollouts in the run (each one: sample, score, update).
      updates_per_rollout: mini-batches per epoch, one optimizer step each; above 1 the later ones are off-policy.
      epochs: passes over each rollout.
      micro_batches: equal parts into which a mini-batch is split to save memory; value and gradient do not change.
      autopsy_delta: trust-region threshold at which every update measures both direction criteria against what it
        really did (two more forward passes, see `training.autopsy`); 0 for none.
    """

    rollouts: int = 100
    updates_per_rollout: int = 4
    epochs: int = 1
    micro_batches: int = 1
    autopsy_delta: float = 0.0


@dataclasses.dataclass(frozen=True)
class Critic:
    """A learned value of every position, used where advantages are estimated by GAE.

    Attributes:
      trunk: "own", a second decoder that begins as a copy of the policy, or "policy": a linear head on the policy's
        hidden states, whose gradient stops there, so that the critic never moves the policy.
      gamma, lam: discount and trace decay of GAE.
      clip: bound on how far a value moves during one rollout's updates (PPO); 0 for none.
      learning_rate: of the critic's own AdamW, which otherwise is configured like the policy's.
      whiten: advantages with mean 0 and variance 1 over the rollout's tokens.
    """

    trunk: Literal["own", "policy"] = "own"
    gamma: float = 1.0
    lam: float = 0.95
    clip: float = 0.2
    learning_rate: float = 1e-5
    whiten: bool = True


@dataclasses.dataclass(frozen=True)
class ReferenceKL:
    """KL to the policy that RL began with. `objective.penalty.kl` puts it into the loss, `reward` into the reward.

    Attributes:
      reward: coefficient of log pi - log reference, subtracted from the reward of each token (k1); 0 for none.
      target: KL in nats a token that the coefficients are steered to (Ziegler 2019); 0 leaves them as they are.
      rate: largest relative change of the coefficients after one rollout, where they are steered.
    """

    reward: float = 0.0
    target: float = 0.0
    rate: float = 0.1


@dataclasses.dataclass(frozen=True)
class RewardModel:
    """A frozen judge in the place of the task's own rewards.

    Attributes:
      source: directory that experiments/train_reward_model.py left; "" for the task's own rewards.
      standardize: give scores mean 0 and standard deviation 1, as measured on the model's held-out replies.
      clip: bound on the absolute score after that; 0 for none.
      batch_size: dialogues scored at once, of similar lengths.
    """

    source: str = ""
    standardize: bool = True
    clip: float = 0.0
    batch_size: int = 32


@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """What is measured after the last update of a rollout, on the whole rollout; it costs one forward pass.

    Attributes:
      margin: alpha of the output-reset residual and overshoot, whatever the objective; 0 measures nothing.
    """

    margin: float = 0.0


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Supervised learning on the task's worked solutions before RL (tasks that have them).

    Attributes:
      steps: optimizer steps; 0 for none.
      batch_size: examples per step.
      learning_rate: peak of a cosine schedule with 5 % warm-up.
    """

    steps: int = 0
    batch_size: int = 128
    learning_rate: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out evaluation: before RL, every `every` rollouts, and at the end.

    Attributes:
      every: rollouts between evaluations; 0 for only before and after.
      prompts: held-out prompts used; 0 for all.
      samples: completions per prompt (avg@k).
      temperature, top_p: sampling of the evaluation; temperature 0 is greedy.
    """

    every: int = 20
    prompts: int = 0
    samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Checkpoints of parameters, optimizer, data position and config.

    Attributes:
      every: rollouts between saves; the last state is always saved.
      keep: how many recent checkpoints stay; the best by evaluation stays as well.
      allow_config_change: resume although the config differs from the checkpoint's.
    """

    every: int = 50
    keep: int = 2
    allow_config_change: bool = False


@dataclasses.dataclass(frozen=True)
class EarlyStop:
    """Ends a run that has collapsed, with a checkpoint and the reason, instead of spending its time.

    Attributes:
      rollouts: rollouts in a row beyond one of the bounds after which the run stops; 0 never stops it.
      reward_below: bound on the mean reward.
      entropy_below: bound on the mean entropy, nats per token.
      truncated_above: bound on the share of truncated responses; 1 for none.
    """

    rollouts: int = 0
    reward_below: float = -1e9
    entropy_below: float = 0.0
    truncated_above: float = 1.0


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Sizes of the device mesh's axes; one of them may be -1 for the rest of the devices."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1


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
        run = schema.read(cls, config, "config")
        check(run)
        return run

    @property
    def sequences(self) -> int:
        """Sequences per rollout (B)."""
        return self.rollout.prompts * self.rollout.group_size

    @property
    def estimator(self) -> str:
        """The advantage estimator, the objective's own resolved."""
        own = objectives.OBJECTIVES[self.objective["name"]].advantage
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
    "reward_model": ("batch_size",),
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
