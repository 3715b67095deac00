"""Names of classes and functions: how a file refers to them, and which it may refer to.

Whoever wrote a file chooses the names in it. A name is looked up by import, and nothing that is
found is called; but a model calls its functions when it is used, so that they are restricted too.
"""

import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

# A manifest may name what these packages define, and nothing else.
PACKAGES = ("equinox", "jax", "numpy", "numpyro", "optax", "retrodict")
# Most functions of JAX say that they live in jax._src; these are the names that will stay.
JAX_NAMESPACES = ("jax.nn", "jax.numpy", "jax.lax", "jax.random", "jax.scipy.special")


def is_subclass(value: Any, parent: type) -> bool:
    return isinstance(value, type) and issubclass(value, parent)


def resolve(name: str) -> Any:
    """What `module:qualname` stands for, if a file may name it; else `LookupError` says why not."""
    module, _, qualname = name.partition(":")
    parts = module.split(".")
    # Importing a `__main__` would run it.
    if parts[0] not in PACKAGES or any(part.startswith("__") for part in parts):
        raise LookupError(f"a file may name only what {', '.join(PACKAGES)} define")
    try:
        found: Any = importlib.import_module(module)
        for depth, part in enumerate(qualname.split(".")):
            # Attributes of modules that are modules lead out of the packages: `os`, `sys`.
            if depth and not isinstance(found, type):
                raise LookupError(f"{qualname} leads through something that is not a class")
            found = getattr(found, part)
    except LookupError:
        raise
    except Exception as error:  # a module that is not meant for this machine may raise anything
        raise LookupError(f"it is not to be found here: {error}") from error
    package = str(getattr(found, "__module__", None)).partition(".")[0]
    # numpy has functions that run text as code; a model can only use its ufuncs and its dtypes.
    harmless = isinstance(found, np.ufunc) or is_subclass(found, np.generic)
    if package not in PACKAGES or (package == "numpy" and not harmless):
        raise LookupError(f"a file may name only what {', '.join(PACKAGES)} define")
    return found


def _candidates(value: Any) -> Iterator[str]:
    """Names under which a function or class might be found, public ones first."""
    module = getattr(value, "__module__", None)
    qualname = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in PACKAGES:
        return
    parts = itertools.takewhile(lambda part: not part.startswith("_"), module.split("."))
    public = itertools.accumulate(parts, lambda outer, part: f"{outer}.{part}")
    namespaces = JAX_NAMESPACES if module.startswith("jax.") else ()
    for namespace in (*public, *namespaces, module):
        yield f"{namespace}:{qualname}"
    # The default activation of equinox's MLP is a lambda that a variable of its module holds.
    for variable, held in vars(sys.modules[module]).items() if module in sys.modules else ():
        if held is value:
            yield f"{module}:{variable}"


def name_of(value: Any) -> str | None:
    """The name by which `load` will find this very function or class, if there is one."""
    for name in _candidates(value):
        try:
            if resolve(name) is value:
                return name
        except LookupError:
            continue
    return None


def described(value: Any) -> str:
    """Where a function or class without such a name was defined."""
    owner = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(value, '__module__', None)}:{owner.__qualname__}"


def last_name(name: str) -> str:
    return re.split("[:.]", name)[-1]


def root_name(class_name: str) -> str:
    """What messages call the object: model for a StateSpaceModel, tree for a dict."""
    if class_name in ("", "dict", "list", "tuple"):
        return "tree"
    words = re.findall("[A-Z][a-z]+", class_name)
    return words[-1].lower() if words else class_name.lower()
