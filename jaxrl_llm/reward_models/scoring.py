"""A frozen reward model at work: dialogues as tokens, in batches of similar length, the scalar at each one's last token."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm import processes
from jaxrl_llm.models.heads import last_valid
from jaxrl_llm.parallel import sharding
from jaxrl_llm.rollout import placement
from jaxrl_llm.tasks import Example
from jaxrl_llm.tasks import prompts as prompting

BUCKET = 8  # the shortest width that rows are padded to; the others are its doubles


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A frozen reward model.

    Attributes:
      graphdef, params: of the `ScalarModel`.
      tokenizer: its own; dialogues reach it as text.
      max_length: of longer dialogues the last tokens are scored.
      shift, scale: a score is (raw - shift) / scale.
      clip: bound on the absolute score after that; 0 for none.
      pad_id: tokens of this id at a dialogue's end do not count, even where they are real: so transformers finds the last
        token, and so its reward models are trained. None for a model that goes by its mask.
      rows: dialogues per forward pass.
    """

    graphdef: nnx.GraphDef
    params: Any
    tokenizer: Any
    max_length: int
    shift: float = 0.0
    scale: float = 1.0
    clip: float = 0.0
    pad_id: int | None = None
    rows: int = 32

    def judge(self, examples: Sequence[Example], replies: Sequence[str]) -> list[float | None]:
        """A score for each reply, as `Task.score`."""
        dialogues = encode(examples, replies, self.tokenizer)
        scores = (self.raw([ids[-self.max_length :] for ids in dialogues]) - self.shift) / self.scale
        return (np.clip(scores, -self.clip, self.clip) if self.clip else scores).tolist()

    def raw(self, dialogues: Sequence[Sequence[int]]) -> np.ndarray:
        """float64 [N] scores of token ids, computed in batches of similar length."""
        if self.pad_id is not None:
            dialogues = [_without_padding(ids, self.pad_id) for ids in dialogues]
        scores, mesh = np.zeros(len(dialogues)), placement.mesh_of(self.params)
        for members, width in length_buckets([len(ids) for ids in dialogues], self.rows):
            batch = pad([dialogues[i] for i in members], self.rows, width)
            if mesh is not None:
                batch = sharding.put(batch, placement.places(batch, mesh))
            with placement.use(mesh):
                found = processes.fetch(_scores(self.graphdef, self.params, *batch))
            scores[members] = found[: len(members)]
        return scores


def scores(graphdef: nnx.GraphDef, params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """float32 [B]: the scalar at each row's last valid token. Tokens int32 [B, L], mask bool [B, L], padding anywhere."""
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0).astype(jnp.int32)
    values = nnx.merge(graphdef, params)(tokens, positions, mask.astype(jnp.int32))
    return last_valid(values, mask)


_scores = jax.jit(scores, static_argnums=0)


def encode(examples: Sequence[Example], replies: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each dialogue, its end included.

    A conversation is written by the tokenizer's chat template with the reply as the last turn, as reward models are
    trained; after a prompt of plain text come the reply and the end token.
    """
    dialogues = []
    for example, reply in zip(examples, replies, strict=True):
        if isinstance(example.prompt, str):
            prompt = prompting.encode(tokenizer, example)
            ids = [*prompt, *tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        else:
            turns = (*example.prompt, {"role": "assistant", "content": reply})
            ids = prompting.encode(tokenizer, dataclasses.replace(example, prompt=turns), answered=True)
        dialogues.append(ids)
    return dialogues


def length_buckets(lengths: Sequence[int], rows: int) -> list[tuple[np.ndarray, int]]:
    """Cuts sequences, sorted by length, into batches of at most `rows`.

    Returns:
      (indices of the members, width) of each batch; widths are BUCKET times a power of two, so that few are compiled.
    """
    order = np.argsort(lengths, kind="stable")
    batches = [order[i : i + rows] for i in range(0, len(order), rows)]
    longest = [max(lengths[i] for i in members) for members in batches]
    return [(m, BUCKET * 2 ** int(np.ceil(np.log2(max(n / BUCKET, 1))))) for m, n in zip(batches, longest, strict=True)]


def pad(sequences: Sequence[Sequence[int]], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded tokens int32 [rows, width] and mask bool; rows without a sequence hold one token, to be ignored."""
    tokens, mask = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
    mask[:, 0] = True
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = True
    return tokens, mask


def _without_padding(ids: Sequence[int], pad_id: int) -> Sequence[int]:
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_id:
        end -= 1
    return ids[:end]
