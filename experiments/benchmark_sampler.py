"""The sampler against transformers' generate, continuous against static batches, and both against the machine's ceilings.

Contestants of a comparison take turns in one process, so that a slow minute of the machine falls on all of them; what is
printed is medians, and ratios with their range over the repetitions. Everything is compiled before the clock starts.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.sampler import Sampler, Usage
from jaxrl_llm.rollout.slots import SamplingConfig

BATCH, PROMPT, NEW, CAPTURE = 32, 32, 128, 20
QWEN3 = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
)
SEQUENCES, SHORT, LONG_SHARE = 256, (8, 24), 0.05  # of the skewed lengths; the long ones take all of NEW


def run(repetitions: int) -> None:
    """Prints every table."""
    graphdef, params = nnx.split(Decoder(QWEN3, rngs=nnx.Rngs(0)), nnx.Param)
    count = sum(x.size for x in jax.tree.leaves(params))
    print(
        f"Qwen3, {QWEN3.num_layers} layers, {QWEN3.hidden_size} wide, {count / 1e6:.1f}M parameters, float32;", end=" "
    )
    print(f"batch {BATCH}, prompt {PROMPT}, {NEW} new tokens, top-{CAPTURE} capture on")
    prompts = np.random.default_rng(0).integers(3, QWEN3.vocab_size, (BATCH, PROMPT)).tolist()
    flops, bandwidth = ceilings()
    for choice in (Choice(), Choice(top_p=0.95)):
        config = SamplingConfig(NEW, stop_ids=(), choice=choice, capture_top_k=CAPTURE)
        sampler = Sampler(graphdef, QWEN3, config)
        contestants = {"jaxrl_llm": lambda s=sampler: s(params, prompts, jax.random.key(0))}
        contestants |= _transformers(prompts, choice)
        print(f"\ntemperature {choice.temperature}, top_p {choice.top_p}")
        seconds = alternate(contestants, repetitions)
        show(seconds, BATCH * NEW)
        bound = _bound(count, flops, bandwidth)
        share = bound / (statistics.median(seconds["jaxrl_llm"]) / NEW)
        print(f"roofline: a step cannot take less than {1e3 * bound:.2f} ms here; share reached {100 * share:.0f} %")
    print(f"ceilings measured: {flops / 1e9:.0f} GFLOP/s (float32 matmul), {bandwidth / 1e9:.1f} GB/s (copy)\n")
    skewed(graphdef, params, repetitions)
    print("google-tunix: not measured (it is not installed beside this project)")


def skewed(graphdef: nnx.GraphDef, params, repetitions: int) -> None:
    """Many short responses and a few at the limit: slots that are refilled, and batches that wait for their longest."""
    rng = np.random.default_rng(0)
    limits = rng.integers(*SHORT, SEQUENCES, endpoint=True)
    limits[rng.choice(SEQUENCES, round(LONG_SHARE * SEQUENCES), replace=False)] = NEW
    prompts = rng.integers(3, QWEN3.vocab_size, (SEQUENCES, PROMPT)).tolist()
    config = SamplingConfig(NEW, stop_ids=(), capture_top_k=CAPTURE, slots=BATCH)
    sampler = Sampler(graphdef, QWEN3, config)
    usage: list[Usage] = []

    def continuous():
        sampler(params, prompts, jax.random.key(0), limits=limits, report=lambda _, used: usage.append(used))

    def static():
        for start in range(0, SEQUENCES, BATCH):
            part = slice(start, start + BATCH)
            # A batch that waits computes every row to the longest one's end.
            sampler(params, prompts[part], jax.random.key(0), limits=np.full(BATCH, limits[part].max()))

    print(f"skewed lengths: {SEQUENCES} sequences of {SHORT[0]} to {SHORT[1]} tokens, {LONG_SHARE:.0%} of {NEW}")
    show(alternate({"continuous": continuous, "static": static}, repetitions), int(limits.sum()))
    used = usage[-1]
    print(
        f"continuous: {used.tokens / used.row_steps:.0%} of the row steps gave a token; {used.chunks} chunks,"
        f" {len(used.programs)} decoding programs {sorted(used.programs)}"
    )


def alternate(contestants: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each, taking turns, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetitions + 1):
        for name, function in contestants.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            if repetition:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def show(seconds: Mapping[str, list[float]], tokens: int) -> None:
    """A line for each contestant; how many times faster than it the first one is, median and range."""
    first = next(iter(seconds.values()))
    for name, own in seconds.items():
        ratios = sorted(theirs / ours for ours, theirs in zip(first, own, strict=True))
        middle = statistics.median(own)
        print(
            f"{name:>14}: {middle:7.2f} s [{min(own):.2f}, {max(own):.2f}]  {tokens / middle:8.0f} tok/s"
            f"   x{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        )


def ceilings() -> tuple[float, float]:
    """FLOP/s of a large float32 product and bytes/s of a large copy, each the best of ten."""

    def best(function, *arguments):
        times = alternate({"": lambda: function(*arguments)}, 10)[""]
        return min(times)

    size = 1536
    square = jnp.ones((size, size), jnp.float32)
    long = jnp.ones(2**26, jnp.float32)
    product = best(jax.jit(jnp.matmul), square, square)
    copy = best(jax.jit(lambda x: x + 1), long)
    return 2 * size**3 / product, 2 * long.nbytes / copy


def _bound(parameters: int, flops: float, bandwidth: float) -> float:
    """Least seconds of a decoding step: its products at the matmul ceiling, or its weights and cache at the copy's."""
    c = QWEN3
    length = PROMPT + NEW / 2  # of the cache, on average
    cache = 2 * BATCH * c.num_layers * length * c.num_kv_heads * c.head_dim
    attention = 4 * BATCH * c.num_layers * length * c.num_heads * c.head_dim
    return max((2 * BATCH * parameters + attention) / flops, 4 * (parameters + cache) / bandwidth)


def _transformers(prompts, choice: Choice) -> dict[str, Callable[[], object]]:
    """Generate on the same architecture, without the records that ours takes; empty where torch is missing."""
    try:
        import torch
        import transformers
    except ImportError as missing:
        print(f"transformers: not measured ({missing.name} is not installed)")
        return {}
    c = QWEN3
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            tie_word_embeddings=c.tie_word_embeddings,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    inputs = torch.tensor(prompts)

    def generate():
        with torch.inference_mode():
            out = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                temperature=choice.temperature,
                top_k=0,
                top_p=choice.top_p,
                max_new_tokens=NEW,
                use_cache=True,
            )
        assert out.shape == (BATCH, PROMPT + NEW)

    return {"transformers": generate}
