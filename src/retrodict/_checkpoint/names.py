"""Names of classes and functions in files.

A name is looked up only if it is on the list of `allowed.py`. A file cannot import anything else.
"""

import importlib
import itertools
import re
from collections.abc import Collection, Iterator
from typing import Any

from retrodict._checkpoint.allowed import FUNCTIONS, current_name

# The `__module__` of most functions of JAX is in jax._src; these names are stable.
JAX_NAMESPACES = (
    "jax.nn",
    "jax.numpy",
    "jax.numpy.linalg",
    "jax.lax",
    "jax.scipy.special",
)


def is_subclass(value: Any, parent: type) -> bool:
    return isinstance(value, type) and issubclass(value, parent)


def resolve(name: Any, allowed: Collection[str]) -> Any:
    """Return the object called `module:name` if it is allowed, else raise `LookupError`.

    Args:
        name: the name in a file.
        allowed: one of the sets of names of `allowed.py`.
    """
    name = current_name(name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in allowed:
        raise LookupError("it is not on the list of names that a file may use here")
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an optional package is missing, or of another version
        raise LookupError(f"it is not installed here: {error}") from error


def _candidates(value: Any) -> Iterator[str]:
    """Yield possible names of a function or class, public ones first."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return
    parts = itertools.takewhile(lambda part: not part.startswith("_"), module.split("."))
    public = itertools.accumulate(parts, lambda outer, part: f"{outer}.{part}")
    namespaces = JAX_NAMESPACES if module.startswith("jax.") else ()
    for namespace in (*public, *namespaces, module):
        yield f"{namespace}:{name}"
    # The default activation of equinox's MLP is a lambda in a variable of its module.
    for variable in FUNCTIONS.get(module, "").split():
        yield f"{module}:{variable}"


def name_of(value: Any, allowed: Collection[str]) -> str | None:
    """Return the name by which `load` finds this function or class, or `None`."""
    for name in map(current_name, _candidates(value)):
        try:
            if name in allowed and resolve(name, allowed) is value:
                return name
        except LookupError:
            continue
    return None


def described(value: Any) -> str:
    """Return the module and name of the definition of a function or class."""
    owner = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(value, '__module__', None)}:{owner.__qualname__}"


def last_name(name: str) -> str:
    return re.split("[:.]", name)[-1]


def root_name(class_name: str) -> str:
    """Return the name of an object in messages: model for a StateSpaceModel, tree for a dict."""
    if class_name in ("", "dict", "list", "tuple"):
        return "tree"
    words = re.findall("[A-Z][a-z]+", class_name)
    return words[-1].lower() if words else class_name.lower()
