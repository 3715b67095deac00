"""Lazy exports of a package (PEP 562).

Importing the whole library takes seconds, mostly for JAX, and `retrodict --help` needs none of it.
A package writes its exports as imports under `if TYPE_CHECKING`, and its `__getattr__` runs one
when the name is first used.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazily(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that is being imported.

    Args:
        package: its name. Its `__init__` holds `from MODULE import NAME as NAME`, each under
            `if TYPE_CHECKING`.
    """
    module = sys.modules[package]
    places = _places(package)

    def load(name: str) -> Any:
        if name not in places:
            hint = "" if name.startswith("_") else _hint(package, name, places)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        place = places[name]
        if place == package:  # a namespace within the package
            value: Any = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(place), name)
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*vars(module), *places}), sorted(places)


def _hint(package: str, name: str, places: dict[str, str]) -> str:
    """Name the namespace of the package that has this attribute, if there is one."""
    for namespace in [place for place, module in places.items() if module == package]:
        if hasattr(importlib.import_module(f"{package}.{namespace}"), name):
            return f"; use {package}.{namespace}.{name}"
    return ""


def _places(package: str) -> dict[str, str]:
    """Return the module of each export, parsed from the source of the package."""
    loader: Any = getattr(sys.modules[package].__spec__, "loader", None)
    tree = ast.parse(loader.get_source(package))
    return {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
