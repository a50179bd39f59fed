"""Functions from outside the package, by import path, and the settings that their signatures declare.

An import path is `module:name`, as `my_lab.losses:huber`, or `file.py:name`. Modules are looked for where Python looks and in the
working directory, and are imported once. The rooms keep what a module's decorators register; nothing is kept here.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import typing
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any


def is_path(name: str) -> bool:
    """Whether `name` is an import path and not the name of something registered."""
    return ":" in name


def block(name: str) -> str:
    """The name of the configuration's block that holds the settings: of an import path the part after the colon."""
    return name.rpartition(":")[2]


def located(name: str) -> str:
    """`name` with the absolute path of its file, where it names a file, so that it is found again from any directory."""
    module, colon, attribute = name.rpartition(":") if is_path(name) else (name, "", "")
    return f"{pathlib.Path(module).expanduser().absolute()}{colon}{attribute}" if module.endswith(".py") else name


def load(module: str, field: str) -> ModuleType:
    """The module of that name, or of the file where it ends in ".py"; imported at the first call.

    Args:
      module: dotted name or path of a .py file.
      field: of the configuration, for messages.

    Raises:
      ValueError: there is no such module, or its import failed; names it.
    """
    if module.endswith(".py"):
        return _load_file(pathlib.Path(located(module)), field)
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            right = f"not found: looked in {here} and where Python looks (PYTHONPATH)"
            raise ValueError(f"{field} names module {module!r}, which is {right}") from error
        raise ValueError(f"{field} names module {module!r}, whose import failed: {error}") from error
    except Exception as error:
        raise ValueError(
            f"{field} names module {module!r}, whose import failed: {type(error).__name__}: {error}"
        ) from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def resolve(path: str, field: str) -> Callable[..., Any]:
    """The function that an import path names.

    Raises:
      ValueError: no such module, no such name in it, or not a function; names the field and what would be right.
    """
    module_name, _, name = path.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"{field} is {path!r}; an import path is module:name, as my_lab.losses:huber")
    module = load(module_name, field)
    if not hasattr(module, name):
        functions = sorted(k for k, v in vars(module).items() if callable(v) and not k.startswith("_"))
        raise ValueError(f"{field} is {path!r}: {module_name} has no {name!r}; it has: {', '.join(functions)}")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{field} is {path!r}, which is not a function but {type(function).__name__}")
    return function


def settings(
    function: Callable[..., Any], field: str, arguments: int, defaults: Mapping[str, Any] | None = None
) -> type:
    """A frozen dataclass of the keyword-only arguments of `function`: their annotations are the schema.

    Args:
      function: to be called with `arguments` positional arguments and its settings by name.
      field: of the configuration, for messages.
      arguments: number of positional arguments that it is given.
      defaults: values in the place of the function's own.

    Raises:
      ValueError: another number of positional arguments, or a setting without annotation or default.
    """
    what = f"{field}: {getattr(function, '__name__', function)}"
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != arguments or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ValueError(
            f"{what} takes ({', '.join(map(str, parameters))}); right are {arguments} positional arguments, then * and"
            " the settings, each by name"
        )
    try:
        hints = typing.get_type_hints(function if not isinstance(function, type) else function.__init__)
    except NameError as error:
        raise ValueError(f"{what} has an annotation that cannot be read: {error}") from error
    fields = []
    for parameter in parameters:
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        name, default = parameter.name, (defaults or {}).get(parameter.name, parameter.default)
        if name not in hints:
            raise ValueError(f"{what} has argument {name!r} without annotation; write it as {name}: float = ...")
        if default is parameter.empty:
            raise ValueError(f"{what} has argument {name!r} without default; every setting needs one")
        if type(default).__hash__ is None:
            raise ValueError(f"{what} has argument {name!r} with a {type(default).__name__} as default; use a tuple")
        fields.append((name, hints[name], dataclasses.field(default=default)))
    return dataclasses.make_dataclass(block(getattr(function, "__name__", "settings")), fields, frozen=True)


def values(section: Any) -> dict[str, Any]:
    """The settings by name, ready to call the function with."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def made_in(function: Any, modules: Iterable[ModuleType]) -> bool:
    """Whether `function` was written in one of `modules`."""
    return getattr(function, "__module__", None) in {module.__name__ for module in modules}


def register(table: dict[str, Any], name: str, entry: Any, function: Callable[..., Any], what: str) -> None:
    """Puts `entry` into `table`; the same function may come again (a reloaded notebook cell), another one may not.

    Raises:
      ValueError: the name is taken, or is not one.
    """
    if not name.isidentifier():
        raise ValueError(f"{what} {name!r}: a name is made of letters, digits and underscores")
    old = getattr(table.get(name), "function", None)
    again = old is not None and (old.__module__, old.__qualname__) == (function.__module__, function.__qualname__)
    if name in table and not again:
        raise ValueError(f"{what} {name!r} of module {function.__module__} has a name that is taken; choose another")
    table[name] = entry


def _load_file(path: pathlib.Path, field: str) -> ModuleType:
    # One name a file: two files of the same name are two modules, one file is imported once.
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ValueError(f"{field} names file {path}, which is not there")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{field} names file {path}, whose import failed: {type(error).__name__}: {error}") from error
    return module
