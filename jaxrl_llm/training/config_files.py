"""Configuration files that build on one another."""

import importlib.util
import pathlib
from types import ModuleType


def beside(file: str, name: str) -> ModuleType:
    """The configuration file `name` in the folder of `file`, as a module.

    Config files are run from their paths and belong to no package, so a plain import would not find a neighbour.

    Args:
      file: the caller's `__file__`.
      name: such as "quickstart.py".
    """
    path = pathlib.Path(file).with_name(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
