"""Frozen dataclasses as configuration schemas: read a mapping, refuse what does not fit, name the field.

A section of the configuration is a frozen dataclass whose annotations are the types and whose defaults are the
defaults. `read` turns a plain mapping (an ml_collections ConfigDict included) into one; `defaults` goes the other way.
It exists because ConfigDict guards overrides on the command line but not what a config file itself writes.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def read(cls: type[T], mapping: Mapping[str, Any], path: str, default: T | None = None) -> T:
    """Builds the frozen dataclass `cls` from `mapping`; nested dataclass fields are read from nested mappings.

    Args:
      cls: a dataclass type; a field annotated `Mapping` is passed on unread, for the room that owns its schema.
      mapping: field name -> value; missing fields take their defaults.
      path: the section's name in messages, such as "config.rollout".
      default: what missing fields are taken from, where it is not the class's defaults.

    Raises:
      ValueError: an unknown field, a missing one without default, or a value of another type; the message names the
        field and what would be right. True and False are not integers here.
    """
    if not isinstance(mapping, Mapping) and not hasattr(mapping, "items"):
        raise ValueError(f"{path} must be a mapping of fields, got {mapping!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in mapping:
        if name not in fields:
            raise UnknownField(f"{path}.{name}", fields)
    values = {}
    for name, field in fields.items():
        inherited = _default(field) if default is None else getattr(default, name)
        if name in mapping:
            values[name] = _value(hints[name], mapping[name], f"{path}.{name}", inherited)
        elif default is not None:
            values[name] = inherited
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"missing field {path}.{name} ({_describe(hints[name])})")
    return cls(**values)


def defaults(section: Any) -> dict[str, Any]:
    """The nested plain dict (tuples kept) of a dataclass instance, ready for a ConfigDict."""
    return {
        field.name: defaults(value) if dataclasses.is_dataclass(value := getattr(section, field.name)) else value
        for field in dataclasses.fields(section)
    }


def require(condition: bool, field: str, value: Any, right: str) -> None:
    """Raises ValueError("<field> is <value>; it must be <right>") unless `condition` holds."""
    if not condition:
        raise ValueError(f"{field} is {value!r}; it must be {right}")


def choose(options: Mapping[str, T], name: str, field: str) -> T:
    """`options[name]`, or a ValueError that names the field, the likeliest choice and all of them."""
    if name not in options:
        raise ValueError(f"unknown {field} {name!r}; choose from: {', '.join(sorted(options))}{meant(name, options)}")
    return options[name]


def meant(value: Any, options: Iterable[Any]) -> str:
    """ "did you mean 'drpo'? " where one of the options is spelt like `value`, else nothing."""
    alike = difflib.get_close_matches(str(value), [str(option) for option in options], 1)
    return f"; did you mean {alike[0]!r}?" if alike else ""


class UnknownField(ValueError):
    """A configuration names a field that its section does not have.

    Attributes:
      path: of the field, from the configuration's root.
    """

    def __init__(self, path: str, fields: Iterable[str]):
        super().__init__(f"unknown field {path}; choose from: {', '.join(sorted(fields))}")
        self.path = path


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _value(hint: Any, value: Any, path: str, default: Any = None) -> Any:
    if dataclasses.is_dataclass(hint):
        section = default if isinstance(default, hint) else None
        return value if isinstance(value, hint) else read(hint, value, path, section)
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices or isinstance(value, bool) != any(isinstance(c, bool) for c in choices):
            raise ValueError(
                f"{path} is {value!r}; choose from: {', '.join(map(repr, choices))}{meant(value, choices)}"
            )
        return value
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        return _value(next(o for o in options if o is not type(None)), value, path)
    if origin is tuple:
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise ValueError(f"{path} is {value!r}; it must be a sequence")
        item = typing.get_args(hint)[0]
        return tuple(_value(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        raise ValueError(f"{path} is {value!r}; it must be an integer, and a boolean is not one")
    if isinstance(hint, type) and not isinstance(value, hint):
        raise ValueError(f"{path} is {value!r} ({type(value).__name__}); it must be {_describe(hint)}")
    return value


def _describe(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))
