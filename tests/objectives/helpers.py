"""Inputs for the objective tests."""

import numpy as np

from jaxrl_llm.objectives import LossInputs


def make_inputs(
    seed: int = 0, batch: int = 3, length: int = 5, vocab: int = 6, width: int = 3, dtype=np.float64, **changes
):
    """Random but consistent inputs: log-probs of two softmaxes over `vocab` tokens, a top-K view of the first."""
    rng = np.random.default_rng(seed)
    mu, pi, old = (log_softmax(rng.normal(size=(batch, length, vocab)) * 1.5) for _ in range(3))
    tokens = rng.integers(0, vocab, (batch, length))
    ids = np.argsort(-mu, axis=-1)[..., :width]
    at = lambda x, i: np.take_along_axis(x, i, axis=-1)  # noqa: E731
    fields = {
        "logprobs": at(pi, tokens[..., None])[..., 0],
        "behavior_logprobs": at(mu, tokens[..., None])[..., 0],
        "old_logprobs": at(old, tokens[..., None])[..., 0],
        "reference_logprobs": at(old, tokens[..., None])[..., 0],
        "entropy": -(np.exp(pi) * pi).sum(-1),
        "advantages": rng.choice([-1.5, -0.5, 0.0, 1.0, 2.0], (batch, length)),
        "behavior_topk_logprobs": at(mu, ids),
        "topk_logprobs": at(pi, ids),
    }
    fields = {name: value.astype(dtype) for name, value in fields.items()}
    mask = np.arange(length) < np.array([length, *rng.integers(1, length, batch - 1)])[:, None]
    fields |= {"mask": mask, "tokens": tokens.astype(np.int32), "topk_ids": ids.astype(np.int32)}
    return LossInputs(**(fields | changes), vocab_size=vocab)


def log_softmax(x):
    return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)
