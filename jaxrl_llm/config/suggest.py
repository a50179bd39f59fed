"""What a mistyped field may have been meant to be, looked for in the whole configuration."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

SUGGESTIONS = 3


def paths(config: Mapping[str, Any], prefix: str = "config") -> Iterator[str]:
    """Every field of a nested configuration by its dotted path, sections included."""
    for name, value in config.items():
        path = f"{prefix}.{name}"
        yield path
        if hasattr(value, "items"):
            yield from paths(value, path)


def closest(path: str, known: list[str]) -> list[str]:
    """The fields that `path` may have been meant to be, likeliest first, at most `SUGGESTIONS`.

    A field of the very same name in another section comes first, then names that are spelt alike: in the same section,
    then anywhere.
    """
    section, _, name = path.rpartition(".")
    same = [other for other in known if other.rpartition(".")[2] == name]
    beside = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    alike = [f"{section}.{word}" for word in difflib.get_close_matches(name, beside, SUGGESTIONS, cutoff=0.7)]
    names = {other.rpartition(".")[2] for other in known}
    spelt = difflib.get_close_matches(name, names, SUGGESTIONS, cutoff=0.7)
    anywhere = [other for word in spelt for other in known if other.rpartition(".")[2] == word]
    # The shortest path first: a section's own field before those of its parts.
    found = dict.fromkeys([*sorted(same, key=_depth), *alike] or sorted(anywhere, key=_depth))
    return list(found)[:SUGGESTIONS]


def unknown_field(path: str, config: Mapping[str, Any]) -> str:
    """One line about a field that a configuration does not have.

    Args:
      path: as the user wrote it, "config.training.staleness".
      config: the configuration, nested.
    """
    known = list(paths(config))
    section = path.rpartition(".")[0]
    while section != "config" and section not in known:
        section = section.rpartition(".")[0]
    here = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    found = closest(path, known)
    meant = f"; did you mean {' or '.join(found)}?" if found else ";"
    there = f" {section} has: {', '.join(sorted(here))}" if here else f" {section} is a value and has no fields"
    return f"unknown field {path}{meant}{there}"


def _depth(path: str) -> tuple[int, str]:
    return path.count("."), path
