"""Configuration files as modules, so that they can build on one another."""

import importlib.util
import pathlib
from types import ModuleType


def load(path: pathlib.Path) -> ModuleType:
    """The configuration file at `path` as a module; config files belong to no package and cannot be imported by name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def beside(file: str, name: str) -> ModuleType:
    """The configuration file `name` in the folder of `file`, the caller's `__file__`."""
    return load(pathlib.Path(file).with_name(name))
