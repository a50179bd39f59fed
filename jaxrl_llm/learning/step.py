"""One optimizer step, and the forward pass that it shares with scoring. Pure functions of state and batch.

The gradient of a batch is `sum of grad(numerator) / sum of denominators` over its micro-batches, divided once at the end,
so the number of micro-batches and of data shards changes memory and time but neither value nor gradient.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxrl_llm import objectives
from jaxrl_llm.learning import minibatches
from jaxrl_llm.learning.forward_rows import rows_of
from jaxrl_llm.models.moe import router_load
from jaxrl_llm.ops.fp8 import Fp8Sites
from jaxrl_llm.ops.token_stats import Layout, token_stats
from jaxrl_llm.rollout.emulate import quantize_weights
from jaxrl_llm.types import Batch, TokenStats, TrainState

Metrics = dict[str, objectives.Metric]


@dataclasses.dataclass(frozen=True)
class Forward:
    """The policy's forward pass to token statistics. Hashable: every field is static under jit.

    Attributes:
      graphdef: the model without its parameters (`nnx.split`).
      vocab_size: V.
      temperature: logits are divided by it, as the sampler's were.
      fp8: sites emulated in the trainer's forward (`end_to_end`), or None.
      entropy, topk: which statistics beyond the log-probs to compute.
      layout: how tokens and vocabulary lie on the mesh, or None on one device.
    """

    graphdef: nnx.GraphDef
    vocab_size: int
    temperature: float = 1.0
    fp8: Fp8Sites | None = None
    entropy: bool = False
    topk: bool = False
    layout: Layout | None = None

    def __call__(self, params: Any, batch: Batch) -> TokenStats:
        """Statistics [B, T] (and [B, T, K]) of the current policy at the batch's response tokens, differentiable.

        Where the batch carries `routed_experts`, the tokens go through those experts.
        """
        if self.fp8 is not None:
            params = quantize_weights(params, self.fp8)
        model = nnx.merge(self.graphdef, params)
        rows = rows_of(batch)
        hidden, experts = model.hidden_and_routing(
            rows.tokens, rows.positions, rows.segment_ids, self.fp8, rows.routed_experts
        )
        hidden = rows.before(hidden)
        tied = model.head is None
        stats = token_stats(
            hidden,
            model.embedding[...].astype(hidden.dtype) if tied else model.unembedding(),
            rows.pick(batch.response_tokens),
            temperature=self.temperature,
            entropy=self.entropy,
            ids=rows.pick(batch.topk.ids) if self.topk else None,
            mask=rows.pick(batch.response_mask),
            fp8="off" if self.fp8 is None else self.fp8.logits,
            tied=tied,
            layout=self.layout,
        )
        stats = jax.tree.map(rows.place, stats)
        if experts is None:
            return stats
        return stats.replace(router_load=router_load(experts, rows.segment_ids > 0, model.config.moe.num_experts))


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """`(state, batch) -> (state, metrics)`: one optimizer step on one mini-batch.

    A step whose loss or gradient is not finite changes neither parameters nor optimizer state and is counted in
    `TrainState.skipped`.

    Attributes:
      forward: the policy.
      loss: the objective with its corrections, penalties and aggregation.
      optimizer: optax transformation, clipping included.
      micro_batches: parts computed one after another to save memory.
    """

    forward: Forward
    loss: objectives.PolicyLoss
    optimizer: optax.GradientTransformation
    micro_batches: int = 1

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        gradient, terms = self.accumulate(state.params, batch)
        value = objectives.divide(terms.numerator, terms.denominator)
        gradient = jax.tree.map(lambda g: objectives.divide(g, terms.denominator), gradient)
        norm = optax.global_norm(gradient)
        finite = jnp.isfinite(norm) & jnp.isfinite(value)

        updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        new_state = state.replace(
            step=state.step + 1, params=params, opt_state=opt_state, skipped=state.skipped + ~finite
        )
        whole = terms.maxima | {
            "loss": value,
            "optimizer/grad_norm": norm,
            "optimizer/update_norm": jnp.where(finite, optax.global_norm(updates), 0.0),
            "optimizer/skipped": ~finite,
        }
        one = jnp.float32(1.0)
        return new_state, terms.metrics | {k: objectives.Metric(v.astype(jnp.float32), one) for k, v in whole.items()}

    def accumulate(self, params: Any, batch: Batch) -> tuple[Any, objectives.LossTerms]:
        """Float32 gradient of the numerator and the loss terms, summed over micro-batches."""

        def one(part: Batch):
            (_, terms), gradient = jax.value_and_grad(self._numerator, has_aux=True)(params, part)
            return jax.tree.map(lambda g: g.astype(jnp.float32), gradient), terms

        parts = minibatches.split(batch, self.micro_batches)
        first = jax.tree.map(lambda x: x[0], parts)
        if len(parts.tokens) == 1:
            return one(first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, first))

        def add(total, part):
            gradient, terms = one(part)
            return (jax.tree.map(jnp.add, total[0], gradient), objectives.add(total[1], terms)), None

        return jax.lax.scan(add, zeros, parts)[0]

    def _numerator(self, params: Any, batch: Batch) -> tuple[jax.Array, objectives.LossTerms]:
        stats = self.forward(params, batch)
        terms = self.loss(loss_inputs(batch, stats, self.forward.vocab_size))
        if stats.router_load is not None:
            # How many times the even share the busiest expert of any layer gets: 1 is balanced, E / k the worst.
            busiest = jnp.max(stats.router_load) * stats.router_load.shape[-1]
            terms = terms.replace(maxima=terms.maxima | {"router/max_load": busiest})
        return terms.numerator, terms


def score(forward: Forward, params: Any, batch: Batch, micro_batches: int = 1) -> jax.Array:
    """float32 [B, T]: log-probs of the response tokens under `params`, a micro-batch at a time."""
    forward = dataclasses.replace(forward, entropy=False, topk=False)
    parts = minibatches.split(batch, micro_batches)
    return minibatches.join(jax.lax.map(lambda part: forward(params, part).logprobs, parts))


def loss_inputs(batch: Batch, stats: TokenStats, vocab_size: int) -> objectives.LossInputs:
    """What the objectives see of a batch and of the current policy's statistics."""
    return objectives.LossInputs(
        logprobs=stats.logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        advantages=batch.advantages,
        mask=batch.response_mask,
        old_logprobs=batch.old_logprobs,
        reference_logprobs=batch.reference_logprobs,
        entropy=stats.entropy,
        kl_scale=batch.kl_scale,
        tokens=batch.response_tokens,
        topk_ids=None if batch.topk is None else batch.topk.ids,
        behavior_topk_logprobs=None if batch.topk is None else batch.topk.logprobs,
        topk_logprobs=stats.topk_logprobs,
        vocab_size=vocab_size,
    )
