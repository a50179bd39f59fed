"""The sections of a run's configuration: plain frozen dataclasses whose docstrings say what each field means.

`training.config` puts them together and checks the combinations.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

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
      attention: kernel of the attention over whole sequences: flash attention on TPUs (splash) and on NVIDIA GPUs (cudnn, in
        bfloat16), or plain XLA; auto is splash on TPUs where the sequence is long enough to gain by it, else xla.
    """

    source: str = ""
    architecture: Mapping = dataclasses.field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "dots", "full"] = "none"
    attention: Literal["auto", "xla", "splash", "cudnn"] = "auto"

    @property
    def runtime(self) -> dict[str, str]:
        """The fields of `models.config.ModelConfig` that a run decides whatever its checkpoint says."""
        return {name: getattr(self, name) for name in ("dtype", "param_dtype", "remat", "attention")}


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Emulated FP8.

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
      truncation_ratio: which mu the ratios, divergences and mismatch metrics compare pi with, where top_k, top_p or min_p
        cut the vocabulary. "whole" (default): over the whole vocabulary, as pi is; exactly 1 for an unchanged policy.
        "sampled": over the kept tokens, what is drawn from; an unchanged policy then has the kept mass as its ratio.
      max_prompt_length: longer prompts are dropped with a count.
      max_response_length: a response that reaches it without an end token is truncated.
      capture_top_k: K of the recorded top-K view of the behaviour policy; 0 records none.
      routing_replay: the trainer sends every token through the experts that the sampler's routers chose
        (arXiv 2510.11370), so that no change of expert comes between the two.
      slots: sequences decoded at once (continuous batching); 0 for all of them.
      gather_params: on a mesh, the sampler holds a copy of the parameters gathered over the mesh's fsdp and sequence axes
        (divided over tensor and expert alone), so that decoding moves none of them; False decodes with a copy that lies as
        in training, for models that are too large for that.
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
    truncation_ratio: Literal["whole", "sampled"] = "whole"
    max_prompt_length: int = 64
    max_response_length: int = 64
    capture_top_k: int = 0
    routing_replay: bool = False
    slots: int = 0
    gather_params: bool = True
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
      packing: sequences share rows of the forward pass, so that hardly anything is computed on padding; value and gradient
        do not change. Worth it where lengths differ and the model is large: every rung of `training.packing`'s ladder
        that the lengths come to is a program to compile.
      autopsy_delta: trust-region threshold at which every update measures both direction criteria against what it
        really did (two more forward passes, see `training.autopsy`); 0 for none.
    """

    rollouts: int = 100
    updates_per_rollout: int = 4
    epochs: int = 1
    micro_batches: int = 1
    packing: bool = False
    autopsy_delta: float = 0.0

    @property
    def parts(self) -> int:
        """Micro-batches of one pass over a rollout."""
        return self.updates_per_rollout * self.micro_batches


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
      source: directory that experiments/train_reward_model.py left, or directory or hub id of a Hugging Face
        `*ForSequenceClassification` checkpoint with one label; "" for the task's own rewards.
      standardize: give scores mean 0 and standard deviation 1, as measured on held-out replies: those that the model's
        training kept apart or, of a checkpoint, those of the task's held-out pairs.
      held_out_pairs: how many of these pairs a checkpoint is measured on, at every start.
      clip: bound on the absolute score after that; 0 for none.
      batch_size: dialogues scored at once, of similar lengths.
      max_length: tokens of the longest dialogue that a checkpoint scores whole; of longer ones it reads the last tokens.
      dtype: of a checkpoint's parameters and computation.
    """

    source: str = ""
    standardize: bool = True
    held_out_pairs: int = 256
    clip: float = 0.0
    batch_size: int = 32
    max_length: int = 2048
    dtype: Literal["float32", "bfloat16"] = "float32"


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
    """Sizes of the device mesh's axes; one of them may be -1 for the rest of the devices.

    Attributes:
      data: divides the rows of a batch.
      fsdp: divides them too, and parameters and optimizer state besides.
      sequence: divides the tokens of every row, for long responses; in sampling, which goes token by token, rows. It
        divides parameters and optimizer state as fsdp does.
      tensor: divides heads, the width of feed-forward layers and the vocabulary.
      expert: divides the experts of a mixture.
    """

    data: int = -1
    fsdp: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
