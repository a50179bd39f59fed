"""Measures parts of the package against each other: medians over repetitions in one run, printed as ratios.

    python experiments/benchmark.py --part=divergence
    python experiments/benchmark.py --part=grading --cases=200

divergence: D and D_dot from gathered log-probs, as a share of the log-prob computation over the vocabulary itself.
grading: completions that the graders' pool judges in a second, plain numbers and formulas, with one worker and several.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from jaxrl_llm.objectives import divergence as dv
from jaxrl_llm.tasks.rewards.pool import GraderPool, PoolConfig

_PART = flags.DEFINE_enum("part", "divergence", ["divergence", "grading"], "What to measure.")
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens (B x T).")
_VOCAB = flags.DEFINE_integer("vocab", 151_936, "Vocabulary.")
_TOP_K = flags.DEFINE_integer("top_k", 20, "K.")
_CASES = flags.DEFINE_integer("cases", 1024, "Completions graded at once.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 7, "Timed runs of each, after one that is not counted.")


def median_seconds(function, *arguments) -> tuple[float, float, float]:
    """Median, fastest and slowest of the repetitions."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(_REPETITIONS.value):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), min(seconds), max(seconds)


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

    whole, part = median_seconds(logprobs, logits), median_seconds(both, *logprobs(logits))
    for name, (middle, low, high) in (("log-probs over V", whole), ("D and D_dot, K", part)):
        print(f"{name:>18}: {1e3 * middle:9.3f} ms  [{1e3 * low:.3f}, {1e3 * high:.3f}]")
    print(f"share: {100 * part[0] / whole[0]:.3f} %  (N = {n}, V = {v}, K = {k})")


def grading() -> None:
    """Prints completions per second; all are different, so that nothing remembered helps."""
    n = _CASES.value
    thoughts = "First we look at the numbers, and then we add them up.\n" * 40
    kinds = {
        "numbers": lambda i: (rf"{thoughts}\boxed{{{i},000}}", f"{i}000"),
        "formulas": lambda i: (rf"{thoughts}\boxed{{\frac{{{i}+\sqrt{{{i + 1}}}}}{{2}}}}", rf"\frac{{{i}}}{{2}}"),
    }
    for workers in (1, 2, 4):
        with GraderPool("math", PoolConfig(workers=workers)) as pool:
            for name, make in kinds.items():
                shifts = iter(range(1, 10**9, n))

                def grade(make=make, shifts=shifts, pool=pool):
                    start = next(shifts)
                    pairs = map(make, range(start, start + n))
                    return pool.grade([{"completion": completion, "truth": truth} for completion, truth in pairs])

                middle, low, high = (n / seconds for seconds in median_seconds(grade))
                print(f"{workers} workers, {name:>8}: {middle:7.0f} completions/s  [{high:.0f}, {low:.0f}]")
            print(f"{workers} workers: {dict(pool.counts)}")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    {"divergence": divergence, "grading": grading}[_PART.value]()


if __name__ == "__main__":
    app.run(main)
