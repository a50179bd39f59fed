"""Measures parts of the package against each other: medians over repetitions in one run, printed as ratios.

    python experiments/benchmark.py --part=divergence

divergence: D and D_dot from gathered log-probs, as a share of the log-prob computation over the vocabulary itself.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from jaxrl_llm.objectives import divergence as dv

_PART = flags.DEFINE_enum("part", "divergence", ["divergence"], "What to measure.")
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens (B x T).")
_VOCAB = flags.DEFINE_integer("vocab", 151_936, "Vocabulary.")
_TOP_K = flags.DEFINE_integer("top_k", 20, "K.")
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


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    {"divergence": divergence}[_PART.value]()


if __name__ == "__main__":
    app.run(main)
