"""Sequence packing, the host's part: which sequences share a row of the forward pass, and how large these rows are.

A program needs one static shape for all micro-batches of an optimizer step on all devices. It comes from a ladder whose
budgets, slots of a micro-batch on one device, fall by a tenth a rung from that of unpacked rows; so a run compiles one
program for each rung that its lengths come to, and neighbouring rollouts mostly share them. Short sequences also need
fewer micro-batches. No micro-batch has more slots than an unpacked one, nor costs more, attention to the longer rows
counted.

What is left of padding comes from the devices' waiting for one another and from row ends; with a few sequences a device
and one as long as a row among them, packing has little to give.

The device's part is `rows`; losses see none of either.
"""

import dataclasses
import math

import numpy as np

from jaxrl_llm.axes import round_up
from jaxrl_llm.types import Batch, Packing

STEP = 0.9
RUNGS = 30  # down to 4 % of the unpacked budget
MULTIPLE = 8  # of widths and numbers of tokens: rows of a TPU's tile


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long the sequences of a batch are.

    Attributes:
      tokens: int [B], of prompt and response; 0 where no token carries loss, so that none needs to be computed.
      responses: int [B], tokens that carry loss.
      width, response_width: L and T of the batch.
    """

    tokens: np.ndarray
    responses: np.ndarray
    width: int
    response_width: int

    def take(self, rows: np.ndarray) -> "Lengths":
        """Those of some rows, int [n]."""
        return dataclasses.replace(self, tokens=self.tokens[rows], responses=self.responses[rows])


def lengths_of(batch: Batch) -> Lengths:
    """The lengths of a batch that this process can read."""
    real, mask = np.asarray(batch.segment_ids) > 0, np.asarray(batch.response_mask)
    responses = mask.sum(axis=1)
    return Lengths(np.where(responses > 0, real.sum(axis=1), 0), responses, real.shape[1], mask.shape[1])


def plan(
    lengths: Lengths, shards: int, parts: int, attention: float, *, reorder: bool = True, columns: int = 1
) -> tuple[np.ndarray, Packing | None]:
    """The packing of a batch that costs least.

    Args:
      lengths: of B rows.
      shards: equal blocks of rows that lie on different devices.
      parts: micro-batches that an unpacked batch is split into; a packed one is split into as many or fewer.
      attention: what attending to one more column costs a slot, as a share of all else (`flops.attention_share`).
      reorder: whether rows may change places.
      columns: equal parts of every row that lie on different devices.

    Returns:
      An order of the rows, int [B], and the packing of the batch in that order; None where it would save nothing.
    """
    order, best = np.arange(len(lengths.tokens)), None
    block, multiple = len(order) // shards, math.lcm(MULTIPLE, columns)
    least = parts * _cost(block // parts, lengths.width, attention)
    for count in (n for n in range(1, parts + 1) if block % n == 0):
        candidate = deal(lengths, shards, count) if reorder else np.arange(len(order))
        packing = _lowest(lengths.take(candidate), shards, count, block // parts, attention, multiple)
        cost = math.inf if packing is None else count * _cost(packing.rows, packing.width, attention)
        if cost < least:
            order, best, least = candidate, packing, cost
    return order, best


def deal(lengths: Lengths, shards: int, parts: int) -> np.ndarray:
    """An order of the rows, int [B], in which all micro-batches on all devices are about equally long.

    Sequences are dealt from the longest to the shortest, each round in the other direction than the last. Arguments as
    `plan`, but for the number of parts, which is that of the micro-batches as `minibatches.split` cuts them.
    """
    rounds = np.argsort(-lengths.tokens, kind="stable").reshape(-1, shards * parts)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.reshape(-1, shards, parts).swapaxes(0, 1).reshape(-1)


def _lowest(lengths: Lengths, shards: int, parts: int, limit: int, attention: float, multiple: int) -> Packing | None:
    """The lowest rung that holds every one of `parts` micro-batches, within the budget of `limit` unpacked rows."""
    tokens, responses = (_groups(x, shards, parts) for x in (lengths.tokens, lengths.responses))
    slots, cost = limit * lengths.width, _cost(limit, lengths.width, attention)
    for rung in range(RUNGS, -1, -1):
        share = limit * STEP**rung
        few = max(1, math.floor(share))
        # Half as many rows, twice as long: they have fewer ends where little fits any more.
        for rows in dict.fromkeys((math.ceil(share), few, max(1, few // 2))):
            width = round_up(math.ceil(share * lengths.width / rows), multiple)
            affordable = rows * width <= slots and _cost(rows, width, attention) <= cost
            if not affordable or width < tokens.max() or rows * width < tokens.sum(axis=1).max():
                continue
            offsets = [first_fit(group, rows, width) for group in tokens]
            if all(offset is not None for offset in offsets):
                offset = np.stack(offsets).reshape(shards, parts, -1).swapaxes(1, 2).reshape(-1)
                most = _rung(responses.sum(axis=1).max(), tokens.shape[1] * lengths.response_width, multiple)
                return Packing(offset.astype(np.int32), shards, parts, tokens.shape[1], rows, width, most)
    return None


def _cost(rows: int, width: int, attention: float) -> float:
    """Of a forward pass, in slots that attend to nothing."""
    return rows * width * (1 + attention * width)


def first_fit(lengths: np.ndarray, rows: int, width: int) -> np.ndarray | None:
    """Where each sequence goes among `rows` x `width` slots, longest first into the first row with room.

    Args:
      lengths: int [n]; sequences of length 0 go nowhere.

    Returns:
      int [n], slots of the first tokens, -1 for nowhere; None where they do not all fit.
    """
    used, offsets = [0] * rows, np.full(len(lengths), -1)
    for i in np.argsort(-lengths, kind="stable"):
        if lengths[i] == 0:
            break
        row = next((row for row in range(rows) if used[row] + lengths[i] <= width), None)
        if row is None:
            return None
        offsets[i] = row * width + used[row]
        used[row] += int(lengths[i])
    return offsets


def slots(batch: Batch) -> int:
    """Token slots that a forward pass over the batch computes, padding included."""
    return batch.tokens.size if batch.packing is None else batch.packing.slots


def _groups(x: np.ndarray, shards: int, parts: int) -> np.ndarray:
    """[B] -> [shards * parts, n]: what a device computes at once."""
    return x.reshape(shards, -1, parts).swapaxes(1, 2).reshape(shards * parts, -1)


def _rung(needed: int, full: int, multiple: int) -> int:
    """The lowest of full * STEP^k, k = 0, 1, ..., that is no smaller than `needed`."""
    rung = math.floor(math.log(max(needed, 1) / full) / math.log(STEP))
    return min(full, round_up(math.ceil(full * STEP ** min(rung, RUNGS)), multiple))
