"""Measures parts of the package against each other: medians over repetitions in one run, printed as ratios.

    python experiments/benchmark.py --part=divergence
    python experiments/benchmark.py --part=token_stats --tokens=1024 --vocab=16384

divergence: D and D_dot from gathered log-probs, as a share of the log-prob computation over the vocabulary itself.
token_stats: log-probs with both gradients, in tiles, against the program that holds [tokens, vocabulary]: time at the
given size, temporary memory of the compiled programs at 8,192 tokens x 151,936 entries.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from jaxrl_llm.objectives import divergence as dv
from jaxrl_llm.ops.token_stats import token_stats

_PART = flags.DEFINE_enum("part", "divergence", ["divergence", "token_stats"], "What to measure.")
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens (B x T).")
_VOCAB = flags.DEFINE_integer("vocab", 151_936, "Vocabulary.")
_WIDTH = flags.DEFINE_integer("width", 1024, "Width of the hidden states (token_stats).")
_TOP_K = flags.DEFINE_integer("top_k", 20, "K.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 7, "Timed runs of each, after one that is not counted.")


def median_seconds(*calls) -> list[tuple[float, float, float]]:
    """Median, fastest and slowest of the repetitions of each call; the calls take turns, so that load hits all alike."""
    seconds = [[] for _ in calls]
    for repetition in range(_REPETITIONS.value + 1):
        for call, times in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            if repetition > 0:
                times.append(time.perf_counter() - start)
    return [(statistics.median(times), min(times), max(times)) for times in seconds]


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
        tokens = jnp.arange(n) % v
        scalar = lambda hidden, table: jnp.sum(program(hidden, table, tokens))  # noqa: E731
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, _WIDTH.value), (_WIDTH.value, v))]
        return jax.jit(jax.value_and_grad(scalar, (0, 1))).lower(*shapes).compile()

    def naive(hidden, unembedding, tokens):
        return jnp.take_along_axis(jax.nn.log_softmax(hidden @ unembedding), tokens[:, None], 1)

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
    steps = [functools.partial(compiled(f, n, v), hidden, unembedding) for f in programs.values()]
    times = dict(zip(programs, median_seconds(*steps), strict=True))
    show(times)
    print(f"ratio: {times['in tiles'][0] / times['naive'][0]:.2f}  (N = {n}, V = {v}, D = {_WIDTH.value})")


def show(times: dict[str, tuple[float, float, float]]) -> None:
    """One line for each."""
    for name, (middle, low, high) in times.items():
        print(f"{name:>18}: {1e3 * middle:9.3f} ms  [{1e3 * low:.3f}, {1e3 * high:.3f}]")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    {"divergence": divergence, "token_stats": token_statistics}[_PART.value]()


if __name__ == "__main__":
    app.run(main)
