"""What is asked of an objective that was written outside the package, before anything compiles."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.objectives.inputs import LossInputs, TokenLoss, sanitize

B, T, K, V = 2, 3, 2, 5  # of the batch that is only traced


def check(loss: Any) -> None:
    """Traces a `PolicyLoss` on a batch of 2 x 3 tokens (`jax.eval_shape`: nothing is computed).

    Raises:
      ValueError: the objective fails there, or answers with another type, shape or dtype; says which and what is right.
    """
    inputs = _inputs(loss.needs)
    what = f"objective {loss.name!r}"
    try:
        answer = jax.eval_shape(lambda x: loss.token_loss(sanitize(x, loss.anchor)), inputs)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{what} fails on a batch of {B} x {T} tokens that holds what it declares to need"
            f" ({', '.join(sorted(loss.needs)) or 'nothing beyond log-probs'}): {type(error).__name__}: {reason}"
        ) from error
    if not isinstance(answer, TokenLoss):
        raise ValueError(f"{what} returns {type(answer).__name__}; it must be a TokenLoss")
    _array(answer.loss, f"{what}: loss", jnp.floating)
    if answer.kept is not None:
        _array(answer.kept, f"{what}: kept", jnp.bool_)
    if not isinstance(answer.metrics, dict):
        raise ValueError(f"{what}: metrics is {type(answer.metrics).__name__}; it must be a dict of arrays")
    for name, value in answer.metrics.items():
        _array(value, f"{what}: metrics[{name!r}]", jnp.generic)


def _array(value: Any, what: str, kind: Any) -> None:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape != (B, T):
        raise ValueError(
            f"{what} has shape {shape} on a batch of {B} x {T} tokens; it must be one value a token, ({B}, {T}):"
            " the aggregation divides, not the objective"
        )
    # Float64 would come of a constant of NumPy's where x64 is on.
    if not jnp.issubdtype(dtype, kind) or dtype.itemsize == 2:
        right = "bool" if kind is jnp.bool_ else "float32"
        raise ValueError(f"{what} has dtype {dtype}; it must be {right}")


def _inputs(needs: frozenset[str]) -> LossInputs:
    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    tokens = array(B, T)
    fields = {name: tokens for name in needs if name != "topk_logprobs"}
    if "topk_logprobs" in needs:
        view = array(B, T, K)
        fields |= {"topk_logprobs": view, "behavior_topk_logprobs": view, "topk_ids": array(B, T, K, dtype=jnp.int32)}
        fields["tokens"] = array(B, T, dtype=jnp.int32)
    return LossInputs(tokens, tokens, tokens, array(B, T, dtype=jnp.bool_), vocab_size=V, **fields)
