"""Reads a source into examples, and accounts for every row: kept, repeated, of no use, or malformed."""

import collections
import dataclasses
import logging
from typing import Literal

from jaxrl_llm.tasks.base import Example
from jaxrl_llm.tasks.schemas import SCHEMAS
from jaxrl_llm.tasks.sources import RowError, Rows, Skip, Source, load

log = logging.getLogger(__name__)

Malformed = Literal["refuse", "skip"]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Examples and what became of the other rows.

    Attributes:
      examples: in the source's order.
      rows: rows of the source.
      dropped: reason -> rows left out for it.
      first_malformed: the message of the first malformed row, or "".
    """

    examples: list[Example]
    rows: int
    dropped: dict[str, int]
    first_malformed: str = ""

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        first = f" (first: {self.first_malformed})" if self.first_malformed else ""
        return f"{len(self.examples)} of {self.rows} rows" + (f"; left out: {reasons}{first}" if reasons else "")


def read(name: str, source: Source, malformed: Malformed, field: str) -> Dataset:
    """All examples of a source.

    Args:
      name: prefix of the examples' ids, which are "<name>-<row>".
      source: where the rows are and what is in them.
      malformed: "refuse" stops at the first malformed row, "skip" leaves malformed rows out and counts them.
      field: the configuration's name for the source, for messages.

    Raises:
      ValueError: the source cannot be read, a row is malformed (names file, row and field) and they are refused, or no
        row is left.
    """
    rows = load(source, field)
    dropped: collections.Counter[str] = collections.Counter()
    examples, first_malformed, seen = [], "", set()
    for number in _distinct(rows, dropped):
        try:
            example = SCHEMAS[source.schema](rows[number], f"{name}-{number}")
        except Skip as reason:
            dropped[str(reason)] += 1
            continue
        except RowError as error:
            message = f"{source.path}, row {number + 1}, {error}"
            if malformed == "refuse":
                raise ValueError(f"{message} (set malformed to 'skip' to go on without such rows)") from None
            dropped["malformed"] += 1
            first_malformed = first_malformed or message
            continue
        index = example.metadata.get("index")
        if index is not None and index in seen:
            dropped["repeated"] += 1
            continue
        seen.add(index)
        examples.append(example)
    result = Dataset(examples, len(rows), dict(dropped), first_malformed)
    if not examples:
        raise ValueError(f"{field}.path = {source.path!r} has no usable rows: {result}")
    return result


def report(name: str, read: Dataset) -> None:
    """Logs what became of a source's rows: a warning where some were left out."""
    log.log(logging.WARNING if read.dropped else logging.INFO, "%s: %s", name, read)


def _distinct(rows: Rows, dropped: collections.Counter) -> list[int]:
    """Rows whose extra_info.index is new: the published DAPO-Math-17k repeats each prompt about a hundred times."""
    indices = rows.numbers("extra_info", "index")
    if indices is None:
        return list(range(len(rows)))
    first: dict[object, int] = {}
    for number, index in enumerate(indices):
        first.setdefault(("row", number) if index is None else index, number)
    if len(first) < len(rows):
        dropped["repeated"] = len(rows) - len(first)
    return list(first.values())
