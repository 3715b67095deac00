"""Rebuild objects from JSON nodes and arrays."""

import dataclasses
import functools
import inspect
import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from retrodict._arrays import on_device
from retrodict._checkpoint.allowed import (
    ENUM_NAMES,
    FUNCTION_NAMES,
    NAMES_VERSION,
    RECORD_NAMES,
    VALUE_NAMES,
)
from retrodict._checkpoint.names import (
    CheckpointError,
    described,
    dtype_name,
    fields_of,
    is_extension,
    is_record,
    is_record_class,
    last_name,
    name_of,
    resolve,
)
from retrodict._interface import shorten

MAX_NAME = 100
"""The largest number of characters of a field of a class without declared fields."""

MAX_OF_A_HASH = 100
"""The largest number of keys of a dict with the same hash."""

DTYPE_NAME = re.compile(r"[<>=|]?[A-Za-z]\w*(\[\w+\])?")
ABSENT: Any = object()  # there is no `like`, or it has no part here


@dataclasses.dataclass
class Reader:
    """A reader of one object, which is compared with a second one, `like`.

    Attributes:
        path: the file, for messages.
        root: the name of the object in messages.
        entries: the entries of the arrays in the manifest.
        read: returns the bytes of an array in the `.npy` format, by its index.
        known: further classes that the file may name, by name.
        names_version: the version of the list of names with which the file was written.
    """

    path: Path
    root: str
    entries: list[Any]
    read: Callable[[int], bytes]
    known: dict[str, type]
    names_version: Any

    def __post_init__(self) -> None:
        self.unread = set(range(len(self.entries)))

    def decode(self, node: Any, like: Any, path: str) -> Any:
        if isinstance(node, list):
            raise TypeError(f"{path} is a list without a kind")
        if not isinstance(node, dict):
            return self.decode_scalar(node, like, path)
        if "class" in node:
            return self.decode_record(node, like, path)
        ((tag, content),) = node.items()
        if tag in SCALARS:
            return self.decode_scalar(SCALARS[tag](content), like, path)
        readers: dict[str, Callable[[Any, Any, str], Any]] = {
            "array": self.decode_array,
            "callable": self.decode_callable,
            "dict": self.decode_dict,
            "enum": self.decode_enum,
            "list": functools.partial(self.decode_items, list),
            "name": self.decode_name,
            "partial": self.decode_partial,
            "tuple": functools.partial(self.decode_items, tuple),
        }
        return readers[tag](content, like, path)

    def decode_scalar(self, value: Any, like: Any, path: str) -> Any:
        if like is not ABSENT and _category(value) is not _category(like):
            self.differ(path, _shown(value), like)
        return value

    def decode_items(self, kind: type, nodes: list[Any], like: Any, path: str) -> Any:
        if like is ABSENT:
            likes = [ABSENT] * len(nodes)
        elif type(like) is kind and len(like) == len(nodes):
            likes = like
        else:
            self.differ(path, f"a {kind.__name__} of length {len(nodes)}", like)
        return kind(
            self.decode(node, part, f"{path}[{i}]")
            for i, (node, part) in enumerate(zip(nodes, likes, strict=True))
        )

    def decode_dict(self, pairs: list[Any], like: Any, path: str) -> dict[Any, Any]:
        keys = [self.decode(key, ABSENT, path) for key, _ in pairs]
        # Hashes of texts are random, and those of numbers are not: many equal ones take long.
        hashes = itertools.groupby(sorted(hash(key) for key in keys if type(key) is not str))
        if any(len(list(equal)) > MAX_OF_A_HASH for _, equal in hashes):
            raise CheckpointError(f"{path} of {self.path} is a dict with keys of one hash.")
        if len(set(keys)) < len(keys):
            raise CheckpointError(f"{path} of {self.path} is a dict with a key that occurs twice.")
        if like is not ABSENT and (type(like) is not dict or set(like) != set(keys)):
            self.differ(path, f"a dict with keys {keys}", like)
        return {
            key: self.decode(
                node, ABSENT if like is ABSENT else like[key], f"{path}[{shorten(key)}]"
            )
            for key, (_, node) in zip(keys, pairs, strict=True)
        }

    def decode_enum(self, content: list[str], like: Any, path: str) -> Any:
        cls = self.named(content[0], ENUM_NAMES, ABSENT, path)
        return self.decode_scalar(cls[content[1]], like, path)

    def decode_name(self, name: str, like: Any, path: str) -> Any:
        if like is not ABSENT and (not callable(like) or is_record(like)):
            self.differ(path, f"the function {name}", like)
        return self.named(name, VALUE_NAMES, like, path)

    def named(self, name: Any, allowed: Collection[str], like: Any, path: str) -> Any:
        """Look up a name, or take the function of this name from `like`."""
        try:
            return resolve(name, allowed)
        except LookupError as error:
            if like is not ABSENT:
                return self.decode_callable(name, like, path)
            self.ask_for_like(f"{path} names {name}, which is refused: {error}.", error)

    def ask_for_like(self, problem: str, error: Exception | None = None) -> NoReturn:
        """Raise an error for what a file may not contain or name."""
        later = type(self.names_version) is int and self.names_version > NAMES_VERSION
        upgrade = " The file was written by a later version of retrodict: upgrade it."
        raise CheckpointError(
            f"{problem}{upgrade if error is not None and later else ''} Pass an object of the same"
            f" structure that has it: rd.load(path, like={self.root})."
        ) from error

    def decode_callable(self, name: str, like: Any, path: str) -> Any:
        if like is ABSENT:
            self.ask_for_like(f"{path} is the function {name}, which a file cannot contain.")
        if not callable(like) or last_name(described(like)) != last_name(name):
            self.differ(path, f"the function {name}", like)
        return like

    def decode_partial(self, content: list[Any], like: Any, path: str) -> Any:
        kind = jax.tree_util.Partial if content[0].startswith("jax") else functools.partial
        likes = [ABSENT] * 3
        if type(like) is kind:
            likes = [like.func, like.args, dict(like.keywords)]
        elif like is not ABSENT:
            self.differ(path, f"a {kind.__name__}", like)
        function, args, keywords = content[1:]
        if like is ABSENT and "callable" not in function:
            # Only functions on the list: neither classes nor callable modules.
            called = self.named(function.get("name"), FUNCTION_NAMES, ABSENT, path)
        else:
            called = self.decode(function, likes[0], path)
        args, keywords = self.decode(args, likes[1], path), self.decode(keywords, likes[2], path)
        return kind(called, *args, **keywords)

    def decode_record(self, node: dict[str, Any], like: Any, path: str) -> Any:
        name, nodes = node["class"], node["fields"]
        cls = self.find_class(name, like, path)
        parts = {} if like is ABSENT else fields_of(like)
        expected = set(nodes)
        if dataclasses.is_dataclass(cls):
            expected = {field.name for field in dataclasses.fields(cls)}
        elif issubclass(cls, tuple):
            expected = set(getattr(cls, "_fields", ()))
        elif hidden := [field for field in nodes if not _is_data(cls, field)]:
            raise CheckpointError(
                f"{path} of {self.path}: a file may not set {hidden} of a {name}."
            )
        if expected != set(nodes):
            raise CheckpointError(
                f"{path} of {self.path} is a {name} with fields {sorted(nodes)}, and this"
                f" version has {sorted(expected)}: it was saved by another version."
            )
        values = {
            field: self.decode(inner, parts.get(field, ABSENT), f"{path}.{field}")
            for field, inner in nodes.items()
        }
        if issubclass(cls, tuple):
            # Avoid the `__new__` of the class, which may run anything.
            return tuple.__new__(cls, [values[field] for field in getattr(cls, "_fields", ())])
        record: Any = object.__new__(cls)
        for field, value in values.items():
            object.__setattr__(record, field, value)
        if issubclass(cls, eqx.Module) and hasattr(cls, "__wrapped__"):
            # Wrappers of functions by equinox also have the name and the docstring.
            return eqx.module_update_wrapper(record)
        return record

    def find_class(self, name: str, like: Any, path: str) -> type:
        try:
            cls = self.known.get(name) or resolve(name, RECORD_NAMES)
        except LookupError as error:
            if like is ABSENT:
                self.ask_for_like(f"{path} is of the unknown class {name}: {error}.", error)
            cls = type(like)
            if last_name(described(cls)) != last_name(name):
                self.differ(path, f"a {name}", like)
        if not is_record_class(cls):
            raise CheckpointError(
                f"{path} of {self.path} names {name}, which a file may not contain."
            )
        if like is not ABSENT and type(like) is not cls:
            self.differ(path, f"a {name}", like)
        return cls

    def decode_array(self, index: int, like: Any, path: str) -> Any:
        if index not in self.unread:
            # Each array is written once. Many references to one array could exhaust the memory.
            raise CheckpointError(f"{path} of {self.path} refers to the array {index} again.")
        self.unread.remove(index)
        entry = self.entries[index]
        kind, shape, dtype = entry["kind"], tuple(entry["shape"]), entry["dtype"]
        described_array = f"an array of shape {shape} and dtype {dtype}"
        if like is not ABSENT:
            alike = hasattr(like, "shape") and hasattr(like, "dtype")
            if not alike or (tuple(like.shape), dtype_name(like.dtype)) != (shape, dtype):
                self.differ(path, described_array, like)
        array: Any = _array(self.read(index))
        if kind == "key":
            array = jax.random.wrap_key_data(jnp.asarray(array), impl=entry["impl"])
        elif is_extension(_dtype(dtype)):
            array = array.view(_dtype(dtype))
        if (array.shape, dtype_name(array.dtype)) != (shape, dtype):
            raise CheckpointError(f"{path} of {self.path} is not {described_array}.")
        if kind == "numpy scalar":
            return array[()]
        if kind != "jax":
            return array
        value = on_device(array)
        if value.dtype != array.dtype:
            raise CheckpointError(
                f"{path} of {self.path} is {described_array}, and JAX has 64-bit types disabled."
                ' Enable them before loading: jax.config.update("jax_enable_x64", True).'
            )
        return value

    def differ(self, path: str, stored: str, like: Any) -> NoReturn:
        raise CheckpointError(
            f"{path} differs: {self.path} contains {stored}, and `like` has {_shown(like)}. Pass an"
            " object of the same structure as the one that was saved."
        )


def _array(data: bytes) -> np.ndarray:
    """Read an array in the `.npy` format, if its declared size is that of its bytes."""
    buffer = io.BytesIO(data)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # about headers of old versions of NumPy
        shape, fortran, dtype = readers[np.lib.format.read_magic(buffer)](buffer)
    size = math.prod(shape) * dtype.itemsize
    # A copy of an array of many texts of length zero takes long, and a byte or more per entry.
    is_empty = not dtype.itemsize and math.prod(shape)
    if size != len(data) - buffer.tell() or is_empty or _is_compound(dtype):
        raise ValueError(f"an array of shape {shape} and dtype {dtype} in {len(data)} bytes")
    order = "F" if fortran else "C"
    return np.ndarray(shape, dtype, data, buffer.tell(), order=order).copy()


def _dtype(name: str) -> np.dtype:
    """Return the dtype of a name: numbers, text and times only."""
    if not isinstance(name, str) or not DTYPE_NAME.fullmatch(name):
        raise ValueError(f"{str(name)[:80]!r} is not the name of a dtype")
    dtype = np.dtype(name)
    if _is_compound(dtype):
        raise ValueError(f"the dtype {name} is compound")
    return dtype


def _complex(parts: list[Any]) -> complex:
    """Return a complex number from the nodes of its parts."""
    return complex(*(float(part["float"] if isinstance(part, dict) else part) for part in parts))


SCALARS: dict[str, Callable[[Any], Any]] = {"complex": _complex, "dtype": _dtype, "float": float}
"""Kinds of nodes that hold one value, each with its reader."""


def _is_compound(dtype: np.dtype) -> bool:
    return dtype.hasobject or dtype.names is not None or dtype.subdtype is not None


def _is_data(cls: type, field: str) -> bool:
    """Return whether a field may be set on a class without declared fields: not over a method."""
    declared = inspect.getattr_static(cls, field, None)
    hides = callable(declared) or isinstance(declared, (property, classmethod, staticmethod))
    is_name = field.isidentifier() and len(field) <= MAX_NAME
    return is_name and not field.startswith("__") and not hides


def _category(value: Any) -> type:
    """Return the category in which static values must agree; all numbers are one category."""
    if type(value) in (int, float, complex):
        return complex
    return np.dtype if isinstance(value, np.dtype) else type(value)


def _shown(value: Any) -> str:
    """Return a short description of a value."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {dtype_name(value.dtype)}"
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return f"a {type(value).__name__} of length {len(value)}"
    if type(value) is dict:
        return f"a dict with keys {list(value)}"
    if callable(value) and not is_record(value):
        return f"the function {name_of(value, VALUE_NAMES) or described(value)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, np.dtype)):
        return repr(value)
    return f"a {name_of(type(value), RECORD_NAMES) or described(type(value))}"
