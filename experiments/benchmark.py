"""Measures parts of the package against each other: medians over repetitions in one run, printed as ratios.

    python experiments/benchmark.py --part=divergence
    python experiments/benchmark.py --part=token_stats --tokens=1024 --vocab=16384
    python experiments/benchmark.py --part=grading --cases=200
    python experiments/benchmark.py --part=sampler --models=qwen3 --tunix_python=/path/to/its/environment/bin/python
    python experiments/benchmark.py --part=step --step_model=qwen3 --sequences=8 --prompt=24 --response=40

divergence: D and D_dot from gathered log-probs, as a share of the log-prob computation over the vocabulary itself.
token_stats: log-probs with both gradients, in tiles, against the program that holds [tokens, vocabulary]: time at the
given size, temporary memory of the compiled programs at 8,192 tokens x 151,936 entries.
step: a GRPO step beside transformers with torch, packed and not, as a share of the machine's ceiling; see benchmarks/step.py.
grading: completions that the graders' pool judges in a second, with one worker and several: plain numbers, formulas that
are compared exactly, and functions, which need SymPy.
sampler: tokens per second beside transformers' and tunix's samplers, of continuous beside static batches, and the share of
the machine's ceilings; see benchmarks/sampler.py.
"""

import functools

import jax
import jax.numpy as jnp
from absl import flags
from benchmarks import sampler, step, timing

from jaxrl_llm.api import command_line
from jaxrl_llm.objectives import divergence as dv
from jaxrl_llm.ops.token_stats import token_stats
from jaxrl_llm.tasks.rewards.pool import GraderPool, PoolConfig

_PART = flags.DEFINE_enum(
    "part", "divergence", ["divergence", "token_stats", "grading", "sampler", "step"], "What to measure."
)
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens (B x T).")
_VOCAB = flags.DEFINE_integer("vocab", 151_936, "Vocabulary.")
_WIDTH = flags.DEFINE_integer("width", 1024, "Width of the hidden states (token_stats).")
_TOP_K = flags.DEFINE_integer("top_k", 20, "K.")
_CASES = flags.DEFINE_integer("cases", 1024, "Completions graded at once.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 7, "Timed runs of each, after one that is not counted.")


def median_seconds(*calls) -> list[tuple[float, float, float]]:
    """Median, fastest and slowest of the repetitions of each call; the calls take turns, so that load hits all alike."""
    return [timing.spread(times) for times in timing.take_turns(calls, _REPETITIONS.value)]


def divergence() -> None:
    """Prints both times and their ratio."""
    n, v, k = _TOKENS.value, _VOCAB.value, _TOP_K.value
    key = jax.random.key(0)
    logits = jax.random.normal(key, (n, v), jnp.float32)
    tokens = jax.random.randint(key, (n,), 0, v)
    ids = jax.random.randint(key, (n, k), 0, v)

    @jax.jit
    def logprobs(logits):
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return (jnp.take_along_axis(logits, tokens[:, None], 1) - total)[:, 0], jnp.take_along_axis(
            logits, ids, 1
        ) - total

    @jax.jit
    def both(sampled, top):
        view = dv.topk_view(ids, top, top[:, ::-1], tokens, sampled, sampled, v)
        return dv.divergence(view), dv.directional_derivative(view)

    gathered = logprobs(logits)
    whole, part = median_seconds(lambda: logprobs(logits), lambda: both(*gathered))
    show({"log-probs over V": whole, "D and D_dot, K": part})
    print(f"share: {100 * part[0] / whole[0]:.3f} %  (N = {n}, V = {v}, K = {k})")


def token_statistics() -> None:
    """Prints both times, both memories and their ratios."""

    def compiled(program, n, v):
        # Weights and tokens are arguments: of constants XLA would compute a part of the gradient beforehand.
        scalar = lambda hidden, table, tokens, weights: jnp.sum(weights * program(hidden, table, tokens))  # noqa: E731
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, _WIDTH.value), (_WIDTH.value, v))]
        shapes += [jax.ShapeDtypeStruct((n,), dtype) for dtype in (jnp.int32, jnp.float32)]
        return jax.jit(jax.value_and_grad(scalar, (0, 1))).lower(*shapes).compile()

    def naive(hidden, unembedding, tokens):
        return jnp.take_along_axis(jax.nn.log_softmax(hidden @ unembedding), tokens[:, None], 1)[:, 0]

    def tiled(hidden, unembedding, tokens):
        return token_stats(hidden, unembedding, tokens).logprobs

    programs = {"naive": naive, "in tiles": tiled}
    n, v = 8192, 151_936
    memory = {k: compiled(f, n, v).memory_analysis().temp_size_in_bytes / 2**20 for k, f in programs.items()}
    for name, size in memory.items():
        print(f"{name:>18}: {size:9.0f} MiB temporary  (N = {n}, V = {v}, D = {_WIDTH.value})")
    print(f"ratio: 1/{memory['naive'] / memory['in tiles']:.0f}")

    n, v = _TOKENS.value, _VOCAB.value
    keys = jax.random.split(jax.random.key(0))
    hidden = jax.random.normal(keys[0], (n, _WIDTH.value))
    unembedding = jax.random.normal(keys[1], (_WIDTH.value, v)) / _WIDTH.value**0.5
    inputs = hidden, unembedding, jnp.arange(n, dtype=jnp.int32) % v, jnp.linspace(-1, 1, n)
    steps = [functools.partial(compiled(f, n, v), *inputs) for f in programs.values()]
    times = dict(zip(programs, median_seconds(*steps), strict=True))
    show(times)
    print(f"ratio: {times['in tiles'][0] / times['naive'][0]:.2f}  (N = {n}, V = {v}, D = {_WIDTH.value})")


def show(times: dict[str, tuple[float, float, float]]) -> None:
    """One line for each."""
    for name, (middle, low, high) in times.items():
        print(f"{name:>18}: {1e3 * middle:9.3f} ms  [{1e3 * low:.3f}, {1e3 * high:.3f}]")


def grading() -> None:
    """Prints completions per second; all are different, so that nothing remembered helps."""
    n = _CASES.value
    thoughts = "First we look at the numbers, and then we add them up.\n" * 40
    kinds = {
        "numbers": lambda i: (rf"{thoughts}\boxed{{{i},000}}", f"{i}000"),
        "formulas": lambda i: (rf"{thoughts}\boxed{{\frac{{{i}+\sqrt{{{i + 1}}}}}{{2}}}}", rf"\frac{{{i}}}{{2}}"),
        "functions": lambda i: (rf"{thoughts}\boxed{{\ln {i}+\sqrt{{{i + 1}}}}}", rf"\frac{{{i}}}{{2}}"),
    }
    for workers in (1, 2, 4):
        with GraderPool("math", PoolConfig(workers=workers)) as pool:
            for name, make in kinds.items():
                shifts = iter(range(1, 10**9, n))

                def grade(make=make, shifts=shifts, pool=pool):
                    start = next(shifts)
                    pairs = map(make, range(start, start + n))
                    return pool.grade([{"completion": completion, "truth": truth} for completion, truth in pairs])

                middle, low, high = (n / seconds for seconds in median_seconds(grade)[0])
                print(f"{workers} workers, {name:>9}: {middle:7.0f} completions/s  [{high:.0f}, {low:.0f}]")
            print(f"{workers} workers: {dict(pool.counts)}")


def main():
    parts = {
        "divergence": divergence,
        "token_stats": token_statistics,
        "grading": grading,
        "sampler": lambda: sampler.measure(_REPETITIONS.value, _TOP_K.value),
        "step": lambda: step.measure(_REPETITIONS.value),
    }
    parts[_PART.value]()


if __name__ == "__main__":
    command_line.run(main)
