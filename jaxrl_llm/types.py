"""The records that the rooms of the house hand to each other.

Every arrow of the data's way (rollout -> advantages -> step) is one frozen pytree defined here, and nothing else is
shared. This module imports no other module of the package.

Shape letters: `B` sequences, `P` prompt positions, `T` response positions, `L = P + T`, `K` width of the top-K view,
`V` vocabulary. Masks are made once, by the sampler, and carried along; nobody derives them from token values, because a
pad id may equal an end id.
"""

import enum

import chex
import flax.struct
import jax


class FinishReason(enum.IntEnum):
    """Why a response ended."""

    STOP = 0  # an end token was drawn; it is the last valid token of the response
    LENGTH = 1  # the response reached its length limit without an end token (a truncation)


@flax.struct.dataclass
class TopKView:
    """The K most probable tokens of the distribution that the sampler drew from, at each response position.

    Attributes:
      ids: int32 [B, T, K], real vocabulary ids, sorted by falling probability. No id repeats within a position.
      logprobs: float32 [B, T, K], log mu at `ids`, after temperature and emulation, over the whole vocabulary; or, where
        `Choice.topk_view` is "sampled", over the tokens that truncation kept, -inf at those that it cut.
    """

    ids: chex.Array
    logprobs: chex.Array


@flax.struct.dataclass
class Rollout:
    """What the sampler did, and exactly which distribution it drew from.

    Rows are group-major: the `G` samples of one prompt are adjacent.

    Attributes:
      prompt_tokens: int32 [B, P], left-padded, so that the last prompt token stands at P - 1.
      prompt_mask: bool [B, P], True on real prompt tokens.
      response_tokens: int32 [B, T], right-padded.
      response_mask: bool [B, T], True on sampled tokens, the end token included. A prefix of each row.
      finish_reason: int32 [B], a `FinishReason`.
      behavior_logprobs: float32 [B, T], log mu of the sampled token under the distribution really sampled from.
      group_ids: int32 [B], which prompt of this rollout the row answers, 0 .. B / G - 1.
      log_kept_mass: float32 [B, T], log of the probability mass that top-k / top-p / min-p truncation kept before
        renormalisation (0 where nothing was cut), so that `behavior_logprobs + log_kept_mass` is the untruncated value.
      topk: top-K view of mu, or None where it was not captured.
      entropy: float32 [B, T], entropy of mu in nats, or None.
      routed_experts: int32 [B, L, MoE layers, experts per token], the experts the sampler's routers chose, or None;
        undefined after the end of a response.
      policy_step: int32 [], optimizer step of the parameters that sampled.
    """

    prompt_tokens: chex.Array
    prompt_mask: chex.Array
    response_tokens: chex.Array
    response_mask: chex.Array
    finish_reason: chex.Array
    behavior_logprobs: chex.Array
    group_ids: chex.Array
    log_kept_mass: chex.Array
    topk: TopKView | None = None
    entropy: chex.Array | None = None
    routed_experts: chex.Array | None = None
    policy_step: chex.Array | int = 0


@flax.struct.dataclass
class Packing:
    """Which rows of the forward pass the sequences of a batch share, so that it does not compute on padding.

    The batch lies in `shards` equal blocks, one a device, and is split into `parts` micro-batches. Each block's part of
    each micro-batch is packed by itself, into `rows` rows of `width` slots.

    Attributes:
      offset: int32 [B], slot of a sequence's first token, counted through the rows of its block; -1 for a sequence that is
        left out because none of its tokens carries loss.
      shards: blocks of rows.
      parts: micro-batches.
      sequences: of a block in a micro-batch.
      rows, width: packed rows of a block, and slots of a row.
      tokens: of a block's responses, carrying loss, at most.
    """

    offset: chex.Array
    shards: int = flax.struct.field(pytree_node=False)
    parts: int = flax.struct.field(pytree_node=False)
    sequences: int = flax.struct.field(pytree_node=False)
    rows: int = flax.struct.field(pytree_node=False)
    width: int = flax.struct.field(pytree_node=False)
    tokens: int = flax.struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        """Token slots of the whole batch."""
        return self.shards * self.parts * self.rows * self.width


@flax.struct.dataclass
class Batch:
    """One optimizer step's data, laid out for the model's forward pass.

    Row b is prompt (left-padded) followed by response (right-padded); the response fills the last T columns of
    `tokens`, T being the width of `response_mask`.

    Attributes:
      tokens: int32 [B, L].
      positions: int32 [B, L], position of each token within its sequence, from 0 at the first real token.
      segment_ids: int32 [B, L], 0 on padding, 1 on the sequence; tokens attend only within their segment.
      response_mask: bool [B, T], positions that carry loss.
      behavior_logprobs: float32 [B, T], log mu of the sampled token, over the whole vocabulary or over the kept tokens
        (`batches.from_rollout`); `topk` speaks of the same distribution.
      advantages: float32 [B, T], 0 outside the mask.
      topk: top-K view of mu, or None.
      old_logprobs: float32 [B, T], log pi_old (trainer's numerics, before this rollout's updates), or None.
      reference_logprobs: float32 [B, T], log-probs under the frozen reference policy, or None.
      old_values: float32 [B, T], critic's values before the updates, or None.
      returns: float32 [B, T], value targets, or None.
      kl_scale: float32 [B], factor on the loss's coefficient of the reference KL, or None for 1.
      log_kept_mass: float32 [B, T], see `Rollout.log_kept_mass`, or None.
      routed_experts: int32 [B, L, MoE layers, experts per token], routing to replay, or None.
      packing: rows that the forward pass shares out among the sequences, or None for a row of its own for each.
    """

    tokens: chex.Array
    positions: chex.Array
    segment_ids: chex.Array
    response_mask: chex.Array
    behavior_logprobs: chex.Array
    advantages: chex.Array
    topk: TopKView | None = None
    old_logprobs: chex.Array | None = None
    reference_logprobs: chex.Array | None = None
    old_values: chex.Array | None = None
    returns: chex.Array | None = None
    kl_scale: chex.Array | None = None
    log_kept_mass: chex.Array | None = None
    routed_experts: chex.Array | None = None
    packing: Packing | None = None

    @property
    def response_tokens(self) -> jax.Array:
        """int32 [B, T], the tokens the policy sampled."""
        return self.tokens[:, self.tokens.shape[1] - self.response_mask.shape[1] :]


@flax.struct.dataclass
class TokenStats:
    """The current policy's statistics at the sampled tokens; only what was asked for is present.

    Float32 whatever the model's dtype, after division of the logits by the temperature.

    Attributes:
      logprobs: float32 [..., ] log pi of the sampled token (full softmax over V).
      entropy: float32 [...], nats, or None.
      topk_logprobs: float32 [..., K], log pi (full softmax) at the behaviour policy's top-K ids, or None.
      logsumexp: float32 [...], of the tempered logits, or None.
      router_load: float32 [MoE layers, E], each expert's share of a layer's assignments over all tokens of the batch,
        or None without routers.
    """

    logprobs: chex.Array
    entropy: chex.Array | None = None
    topk_logprobs: chex.Array | None = None
    logsumexp: chex.Array | None = None
    router_load: chex.Array | None = None


@flax.struct.dataclass
class CriticState:
    """What a critic's step changes.

    Attributes:
      params: of its head, and of its trunk where it has one of its own.
      opt_state: optax state, float32 moments.
    """

    params: chex.ArrayTree
    opt_state: chex.ArrayTree


@flax.struct.dataclass
class TrainState:
    """Everything an optimizer step changes. Randomness is `fold_in(seed, step)`, so no key is stored.

    Attributes:
      step: int32 [], optimizer steps taken, skipped ones included.
      params: the policy's parameters (an `nnx.State` of `nnx.Param`).
      opt_state: optax state, float32 moments.
      skipped: int32 [], steps whose gradient was not finite and that changed nothing.
      reference_params: the frozen policy that RL began with, or None where nothing is compared with it.
      behavior_params: in a checkpoint, the parameters that coming rollouts sample with where those lag behind, oldest
        first; empty while training.
      critic: the critic, or None where advantages need none.
    """

    step: chex.Array
    params: chex.ArrayTree
    opt_state: chex.ArrayTree
    skipped: chex.Array
    reference_params: chex.ArrayTree | None = None
    behavior_params: tuple[chex.ArrayTree, ...] = ()
    critic: CriticState | None = None
