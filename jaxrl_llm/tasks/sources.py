"""Rows of a data set, from the Hugging Face hub or from local files, through `datasets`.

A path that exists is read from disk: .jsonl, .json, .parquet, .arrow, .csv, all but .arrow also compressed, or a folder
(of such files, or written by `Dataset.save_to_disk`). Anything else is taken for a hub id.
"""

import dataclasses
import json
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

_BUILDERS = {".json": "json", ".parquet": "parquet", ".csv": "csv"}
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where rows come from and what is in them.

    Attributes:
      path: hub id, file or folder.
      schema: the fields of a row; see `schemas`.
      split: which split of a hub data set or folder; a single file has only one.
      subset: configuration of a hub data set, such as GSM8K's "main".
      data_dir: folder within a hub data set, such as hh-rlhf's "harmless-base".
    """

    path: str
    schema: Literal["dapo", "problem", "gsm8k", "hh_rlhf"]
    split: str = "train"
    subset: str = ""
    data_dir: str = ""

    def __str__(self) -> str:
        return self.path


class RowError(ValueError):
    """A row that does not fit its schema.

    Attributes:
      field: the field at fault, such as "reward_model.ground_truth"; "" where the row as a whole is.
      problem: what is wrong with it.
    """

    def __init__(self, field: str, problem: str):
        super().__init__(f"field {field!r}: {problem}" if field else problem)
        self.field, self.problem = field, problem


class Skip(Exception):
    """A row of no use that is no mistake either; its text says why, and is counted."""


class Rows(Sequence):
    """The rows of a source, read when asked for. A line that is no JSON object raises `RowError`, a blank one `Skip`."""

    def __init__(self, dataset: Any, lines: bool):
        self._dataset, self._lines = dataset, lines

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = self._dataset[index]
        if not self._lines:
            return row
        if not row["text"].strip():
            raise Skip("blank")
        try:
            row = json.loads(row["text"])
        except json.JSONDecodeError as error:
            raise RowError("", f"not JSON ({error})") from None
        if not isinstance(row, dict):
            raise RowError("", f"a JSON object is needed, this is {type(row).__name__}")
        return row

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[i] for i in range(len(self)))

    def numbers(self, column: str, field: str) -> Sequence[Any] | None:
        """`row[column][field]` of all rows without reading the rest of them, or None where that is not possible."""
        if self._lines or column not in self._dataset.column_names:
            return None
        try:
            return [None if cell is None else cell.get(field) for cell in self._dataset[column]]
        except AttributeError:  # a column that is no struct
            return None


def load(source: Source, field: str) -> Rows:
    """Opens a source.

    Args:
      source: where to look.
      field: the configuration's name for it, for messages.

    Raises:
      ValueError: no such file or data set, or one that cannot be read; names `field` and the reason.
    """
    # Imported here: it takes seconds, and the embedded tasks do without.
    import datasets

    path = pathlib.Path(source.path).expanduser()
    suffix = _suffix(path)
    try:
        if not source.path:
            raise ValueError("give a hub id, a file or a folder")
        if path.is_dir():
            return Rows(_folder(datasets, path, source), lines=False)
        if path.is_file():
            if suffix == ".arrow":
                return Rows(datasets.Dataset.from_file(str(path)), lines=False)
            if suffix == ".jsonl":
                # Line by line: the JSON reader of `datasets` guesses types, and cannot say which line is broken.
                text = datasets.load_dataset("text", data_files=str(path), split="train", features=_text(datasets))
                return Rows(text, lines=True)
            if suffix not in _BUILDERS:
                choices = ", ".join([".jsonl", *_BUILDERS, ".arrow"])
                raise ValueError(f"files that end in {suffix or 'nothing'} are not known; choose from: {choices}")
            return Rows(datasets.load_dataset(_BUILDERS[suffix], data_files=str(path), split="train"), lines=False)
        if suffix in (".jsonl", ".arrow", *_BUILDERS) or source.path.startswith(("/", ".", "~")):
            raise ValueError("there is no such file or folder")
        return Rows(_hub(datasets, source), lines=False)
    except Exception as error:  # `datasets` raises many types; all of them mean that there are no rows
        raise ValueError(f"{field}.path = {source.path!r} cannot be read: {_reason(error)}") from error


def _suffix(path: pathlib.Path) -> str:
    suffixes = [s.lower() for s in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _text(datasets: Any) -> Any:
    return datasets.Features({"text": datasets.Value("large_string")})


def _folder(datasets: Any, path: pathlib.Path, source: Source) -> Any:
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        loaded = datasets.load_from_disk(str(path))
        return loaded[source.split] if isinstance(loaded, datasets.DatasetDict) else loaded
    return datasets.load_dataset(str(path), split=source.split, data_dir=source.data_dir or None)


def _hub(datasets: Any, source: Source) -> Any:
    # Retries are logged as warnings; the one error below says it all.
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return datasets.load_dataset(
            source.path, source.subset or None, split=source.split, data_dir=source.data_dir or None
        )
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    """The first line of the error that caused the others, with a way out where it is about the network."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    # Offline mode is a ConnectionError too.
    return line + ("; without the network, give the path of a local copy" if isinstance(error, ConnectionError) else "")
