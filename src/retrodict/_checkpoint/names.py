"""Names of classes, functions and dtypes in files, and the fields of records.

A name is looked up only if it is on the list of `allowed.py`. A file cannot import anything else.
"""

import dataclasses
import importlib
import itertools
import re
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from retrodict._checkpoint.allowed import FUNCTIONS, current_name

MAX_MESSAGE = 1000
"""Characters of an error message."""


class CheckpointError(ValueError):
    """A file that cannot be loaded: damaged, not a checkpoint, or of another structure.

    Example:
        >>> import pathlib, tempfile, retrodict as rd
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "model.rd")
        ...     _ = path.write_text("not a checkpoint")
        ...     try:
        ...         rd.load(path)
        ...     except rd.CheckpointError:
        ...         print("cannot be loaded")
        cannot be loaded

    Args:
        text: the message. It may quote the file: it is cut, and control characters are replaced.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_MESSAGE:
            half = MAX_MESSAGE // 2
            text = f"{text[:half]} ... {text[-half:]}"
        super().__init__("".join(c if c.isprintable() else "?" for c in " ".join(text.split())))


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
    # The `__module__` of most functions of JAX is in jax._src; the listed names are stable.
    listed = [
        place for place in FUNCTIONS if place.startswith("jax.") and module.startswith("jax.")
    ]
    for namespace in (*public, *listed, module):
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


def is_record(value: Any) -> bool:
    """Return whether a value is stored as its fields."""
    return not isinstance(value, type) and is_record_class(type(value))


def is_record_class(cls: Any) -> bool:
    """Return whether instances are stored as their fields: dataclasses, named tuples, numpyro."""
    return isinstance(cls, type) and (
        dataclasses.is_dataclass(cls)
        or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
        or cls.__module__.partition(".")[0] == "numpyro"
    )


def fields_of(record: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(record):
        return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    if isinstance(record, tuple):
        return dict(zip(getattr(record, "_fields", ()), record, strict=True))
    return dict(vars(record))


def is_extension(dtype: np.dtype) -> bool:
    """Return whether a dtype is not part of the `.npy` format, such as bfloat16."""
    return dtype.isbuiltin == 2


def dtype_name(dtype: Any) -> str:
    if not isinstance(dtype, np.dtype):
        return str(dtype)  # of keys
    plain = dtype.isnative and (dtype.kind in "biufc" or is_extension(dtype))
    return dtype.name if plain else dtype.str
