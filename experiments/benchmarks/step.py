"""A GRPO step of ours and of transformers with torch: same model, tokens, mini-batch, micro-batches and threads.

Both compute in float32: forward, log-probs of the response tokens, clipped ratio, backward, clipping by the global norm,
AdamW. Ours is the step that `training.loop` runs; theirs is written out below as plainly as it gets, with what is known to
be fast (unembedding of response tokens alone, fused AdamW). The model's own FLOPs, those of the tokens that are there, are set
against a product of large matrices that takes its turns in the same run.

    python experiments/benchmark.py --part=step                                         # SmolLM2-135M, minutes to compile
    python experiments/benchmark.py --part=step --remat=full --micro_batches=2
    python experiments/benchmark.py --part=step --step_model=qwen3 --sequences=8 --prompt=24 --response=40

What else runs on the machine falsifies all of it, torch's times most, whose threads wait by spinning.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from benchmarks import subjects, timing

from jaxrl_llm import objectives
from jaxrl_llm.config import Mesh, Optimizer
from jaxrl_llm.experience import batches
from jaxrl_llm.learning import minibatches, packing, trainer
from jaxrl_llm.learning import optimizer as optimizers
from jaxrl_llm.learning.step import Forward, TrainStep
from jaxrl_llm.models.abstract import abstract
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.flops import attention_share, forward_flops
from jaxrl_llm.parallel import sharding
from jaxrl_llm.types import Batch

RATE, NORM, CLIP = 1e-6, 1.0, 0.2

_MODEL = flags.DEFINE_enum("step_model", "smollm2", subjects.NAMES, "SmolLM2-135M, or 4 layers, 256 wide, random.")
_SEQUENCES = flags.DEFINE_integer("sequences", 16, "Sequences of the mini-batch.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 80, "Tokens of a prompt, at most.", lower_bound=4)
_RESPONSE = flags.DEFINE_integer("response", 176, "Tokens of a response, at most.", lower_bound=4)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 4, "Micro-batches of the mini-batch.", lower_bound=1)
_REMAT = flags.DEFINE_enum("remat", "none", ["none", "dots", "full"], "What ours recomputes; theirs with 'full'.")
_UNROLL = flags.DEFINE_integer("unroll", 0, "Layers per iteration of our scan; 0 for all.", lower_bound=0)
_TORCH = flags.DEFINE_bool("torch", True, "Measure transformers with torch, too.")


def measure(repetitions: int) -> None:
    """Prints times, the shares of the ceiling and the ratios, for full rows and for rows of skewed lengths."""
    model, params = subject(_MODEL.value)
    prompt, response, count = _PROMPT.value, _RESPONSE.value, _SEQUENCES.value
    print(
        f"{_MODEL.value}: {count} sequences of up to {prompt} + {response} tokens in {_MICRO_BATCHES.value} micro-batches, "
        f"remat {_REMAT.value}, float32, {repetitions} repetitions"
    )
    full = np.full(count, prompt), np.full(count, response)
    for title, lengths in (("full rows", full), ("skewed lengths", skewed(count, prompt, response))):
        batch = make_batch(model, *lengths)
        order, plan = packing.plan(packing.lengths_of(batch), 1, _MICRO_BATCHES.value, attention_share(model))
        calls = {"ours": ours(model, params, batch)}
        if plan is not None:
            calls["ours, packed"] = ours(model, params, minibatches.take(batch, order, plan))
        if _TORCH.value:
            calls["torch"] = torch_step(model, params, batch)
        report(title, model, lengths, calls, repetitions, batch if plan is None else batch.replace(packing=plan))


def report(title: str, model: ModelConfig, lengths, calls: dict[str, Callable], repetitions: int, batch: Batch) -> None:
    """One line for each; ratios are taken turn by turn, since neighbours in time see the same machine."""
    product, work = subjects.large_product()
    *seconds, products = timing.take_turns([*calls.values(), product], repetitions)
    flops = 3 * sum(forward_flops(model, 1, int(p + r), int(r)) for p, r in zip(*lengths, strict=True))
    peak = [work / s for s in products]
    tokens = int(np.sum(lengths))
    print(f"{title}: {tokens} tokens in {batch.tokens.size} places, {flops / 1e9:.0f} GFLOP of the model's own", end="")
    print("" if batch.packing is None else f"; packed: {packing.slots(batch)} places")
    print("{:>14}: {:.0f} GFLOP/s [{:.0f}, {:.0f}]".format("large product", *(x / 1e9 for x in timing.spread(peak))))
    for name, times in zip(calls, seconds, strict=True):
        share = timing.spread([flops / s / p for s, p in zip(times, peak, strict=True)])
        line = "{:>14}: {:.3f} s [{:.3f}, {:.3f}]".format(name, *timing.spread(times))
        line += "   {:.2f} of the large product's rate [{:.2f}, {:.2f}]".format(*share)
        if name != "torch" and "torch" in calls:
            ratio = timing.spread([theirs / s for theirs, s in zip(seconds[-1], times, strict=True)])
            line += "   {:.2f} times as fast as torch [{:.2f}, {:.2f}]".format(*ratio)
        print(line)


def subject(name: str) -> tuple[ModelConfig, Any]:
    """Architecture and parameters, on the host: every step takes a copy that it may overwrite."""
    model, params = subjects.create(name)
    fields = {"remat": _REMAT.value, "scan_unroll": _UNROLL.value or model.num_layers}
    return dataclasses.replace(model, **fields), jax.device_get(params)


def skewed(count: int, prompt: int, response: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts between half their limit and all of it; one response in eight at the limit, the others exponential with a mean
    of a quarter of it."""
    random = np.random.default_rng(0)
    responses = np.clip(random.exponential(response / 4, count), 1, response).astype(int)
    responses[random.permutation(count)[: max(1, count // 8)]] = response
    return random.integers(prompt // 2, prompt, count, endpoint=True), responses


def make_batch(model: ModelConfig, prompts: np.ndarray, responses: np.ndarray) -> Batch:
    """Random tokens; advantages of both signs, and a behaviour policy that is uniform over 100 tokens."""
    random = np.random.default_rng(0)
    draw = lambda n: random.integers(0, model.vocab_size, n).tolist()  # noqa: E731
    rows = [list(map(draw, lengths)) for lengths in (prompts, responses)]
    batch = batches.from_pairs(*rows, _PROMPT.value, _RESPONSE.value, pad_id=0)
    mask = batch.response_mask
    signs = jnp.where(jnp.arange(len(mask)) % 2 == 0, 1.0, -1.0)
    behavior = jnp.full(mask.shape, -np.log(100.0), jnp.float32)
    return batch.replace(advantages=jnp.where(mask, signs[:, None], 0.0), behavior_logprobs=behavior)


def ours(model: ModelConfig, params: Any, batch: Batch) -> Callable[[], jax.Array]:
    """Our step, again and again on the same mini-batch; it returns the loss."""
    graphdef = abstract(Decoder, model)[0]
    loss = objectives.build({"name": "grpo", "aggregation": {"mode": "token_mean"}})
    optimizer = optimizers.create(Optimizer(learning_rate=RATE, max_grad_norm=NORM), 1)
    step = TrainStep(Forward(graphdef, model.vocab_size), loss, optimizer, _MICRO_BATCHES.value)
    mesh = sharding.create_mesh(Mesh(), jax.devices()[:1])
    params = sharding.put(params, sharding.shardings(params, mesh))
    state = [trainer.initial_state(params, optimizer, mesh)]
    compiled = trainer.compile_step(step, state[0])

    def call():
        state[0], metrics = compiled(state[0], batch)
        return metrics["loss"].numerator

    return call


def torch_step(model: ModelConfig, params: Any, batch: Batch) -> Callable[[], Any]:
    """The same step by transformers and torch, on all cores; it returns the loss."""
    import torch

    policy = subjects.torch_model(model, params).train()
    if _REMAT.value == "full":
        policy.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    names = "tokens", "segment_ids", "positions", "response_tokens", "response_mask", "behavior_logprobs", "advantages"
    arrays = [torch.from_numpy(np.array(getattr(batch, name))) for name in names]
    parts = list(zip(*(x.chunk(_MICRO_BATCHES.value) for x in arrays), strict=True))
    count, width = arrays[4].sum(), arrays[4].shape[1]

    def call():
        optimizer.zero_grad()
        total = 0.0
        for tokens, segments, positions, responses, mask, behavior, advantages in parts:
            out = policy(
                input_ids=tokens.long(), attention_mask=segments, position_ids=positions.long(), logits_to_keep=width + 1,
                use_cache=False,
            )  # fmt: skip
            logprobs = torch.log_softmax(out.logits[:, :-1], dim=-1)
            logprobs = logprobs.gather(-1, responses.long()[..., None])[..., 0]
            ratio = torch.exp(logprobs - behavior)
            losses = torch.maximum(-advantages * ratio, -advantages * ratio.clip(1 - CLIP, 1 + CLIP))
            loss = torch.where(mask, losses, 0.0).sum() / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), NORM)
        optimizer.step()
        return np.float32(total)

    return call
