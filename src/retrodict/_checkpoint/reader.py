"""From nodes of JSON and arrays back to objects."""

import dataclasses
import enum
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from retrodict._checkpoint.errors import CheckpointError
from retrodict._checkpoint.names import described, is_subclass, last_name, name_of, resolve
from retrodict._checkpoint.records import (
    dtype_name,
    fields_of,
    is_extension,
    is_record,
    is_record_class,
)

ABSENT: Any = object()  # no `like` was given, or none of its parts stands here


class Reader:
    """Rebuilds an object from its nodes, beside a second one, `like`, that it is compared with.

    Args:
        path: the file, for messages.
        root: what messages call the object.
        entries: what the manifest says of each array.
        read: the bytes of an array in numpy's format, by its number.
    """

    def __init__(
        self, path: Path, root: str, entries: list[Any], read: Callable[[int], bytes]
    ) -> None:
        self.path = path
        self.root = root
        self.entries = entries
        self.read = read

    def decode(self, node: Any, like: Any, path: str) -> Any:
        if isinstance(node, list):
            raise TypeError(f"{path} is a list without a kind")
        if not isinstance(node, dict):
            return self.decode_scalar(node, like, path)
        if "class" in node:
            return self.decode_record(node, like, path)
        ((tag, content),) = node.items()
        readers: dict[str, Callable[[Any, Any, str], Any]] = {
            "array": self.decode_array,
            "callable": self.decode_callable,
            "complex": lambda c, *at: self.decode_scalar(
                complex(*(self.decode(part, ABSENT, path) for part in c)), *at
            ),
            "dict": self.decode_dict,
            "dtype": lambda c, *at: self.decode_scalar(np.dtype(c), *at),
            "enum": self.decode_enum,
            "float": lambda c, *at: self.decode_scalar(float(c), *at),
            "list": lambda c, *at: self.decode_items(list, c, *at),
            "name": self.decode_name,
            "partial": self.decode_partial,
            "tuple": lambda c, *at: tuple(self.decode_items(tuple, c, *at)),
        }
        return readers[tag](content, like, path)

    def decode_scalar(self, value: Any, like: Any, path: str) -> Any:
        if like is not ABSENT and _category(value) is not _category(like):
            self.differ(path, _shown(value), like)
        return value

    def decode_items(self, kind: type, nodes: list[Any], like: Any, path: str) -> list[Any]:
        if like is ABSENT:
            likes = [ABSENT] * len(nodes)
        elif type(like) is kind and len(like) == len(nodes):
            likes = like
        else:
            self.differ(path, f"a {kind.__name__} of length {len(nodes)}", like)
        return [
            self.decode(node, part, f"{path}[{i}]")
            for i, (node, part) in enumerate(zip(nodes, likes, strict=True))
        ]

    def decode_dict(self, pairs: list[Any], like: Any, path: str) -> dict[Any, Any]:
        keys = [self.decode(key, ABSENT, path) for key, _ in pairs]
        if like is not ABSENT and (type(like) is not dict or set(like) != set(keys)):
            self.differ(path, f"a dict with keys {keys}", like)
        return {
            key: self.decode(node, ABSENT if like is ABSENT else like[key], f"{path}[{key!r}]")
            for key, (_, node) in zip(keys, pairs, strict=True)
        }

    def decode_enum(self, content: list[str], like: Any, path: str) -> Any:
        cls = self.decode_name(content[0], ABSENT, path)
        if not is_subclass(cls, enum.Enum):
            raise CheckpointError(f"{path} of {self.path} names {content[0]}, which is no enum.")
        return self.decode_scalar(cls[content[1]], like, path)

    def decode_name(self, name: str, like: Any, path: str) -> Any:
        if like is not ABSENT and (not callable(like) or is_record(like)):
            self.differ(path, f"the function {name}", like)
        try:
            return resolve(name)
        except LookupError as error:
            if like is not ABSENT:
                return like  # another version of a package has it under another name
            raise CheckpointError(
                f"{path} names {name}, which is refused: {error}. If it ought to be here, pass an"
                f" object of the same structure: rd.load(path, like={self.root})."
            ) from error

    def decode_callable(self, name: str, like: Any, path: str) -> Any:
        if like is ABSENT:
            raise CheckpointError(
                f"{path} is the function {name}, which a file cannot hold. Pass an object of"
                f" the same structure that has it: rd.load(path, like={self.root})."
            )
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
        parts = zip(content[1:], likes, strict=True)
        function, args, keywords = (self.decode(node, part, path) for node, part in parts)
        return kind(function, *args, **keywords)

    def decode_record(self, node: dict[str, Any], like: Any, path: str) -> Any:
        name, nodes = node["class"], node["fields"]
        cls = self.find_class(name, like, path)
        parts = {} if like is ABSENT else fields_of(like)
        expected = set(nodes)
        if dataclasses.is_dataclass(cls):
            expected = {field.name for field in dataclasses.fields(cls)}
        elif issubclass(cls, tuple):
            expected = set(getattr(cls, "_fields", ()))
        if expected != set(nodes):
            raise CheckpointError(
                f"{path} of {self.path} is a {name} with fields {sorted(nodes)}, and here that"
                f" class has {sorted(expected)}: it was saved by another version."
            )
        values = {
            field: self.decode(inner, parts.get(field, ABSENT), f"{path}.{field}")
            for field, inner in nodes.items()
        }
        if issubclass(cls, tuple):
            # Not by the class itself, whose `__new__` may be anything.
            return tuple.__new__(cls, [values[field] for field in getattr(cls, "_fields", ())])
        record: Any = object.__new__(cls)
        for field, value in values.items():
            object.__setattr__(record, field, value)
        if issubclass(cls, eqx.Module) and hasattr(cls, "__wrapped__"):
            # What equinox makes of a function carries the name and the docstring of it as well.
            return eqx.module_update_wrapper(record)
        return record

    def find_class(self, name: str, like: Any, path: str) -> type:
        try:
            cls = resolve(name)
        except LookupError as error:
            if like is ABSENT:
                raise CheckpointError(
                    f"{path} is of the unknown class {name}: {error}. Pass an object of the same"
                    f" structure: rd.load(path, like={self.root})."
                ) from error
            cls = type(like)
            if last_name(described(cls)) != last_name(name):
                self.differ(path, f"a {name}", like)
        if not is_record_class(cls):
            raise CheckpointError(f"{path} of {self.path} names {name}, which no file may build.")
        if like is not ABSENT and type(like) is not cls:
            self.differ(path, f"a {name}", like)
        return cls

    def decode_array(self, index: int, like: Any, path: str) -> Any:
        entry = self.entries[index]
        kind, shape, dtype = entry["kind"], tuple(entry["shape"]), entry["dtype"]
        found = f"an array of shape {shape} and dtype {dtype}"
        if like is not ABSENT:
            alike = hasattr(like, "shape") and hasattr(like, "dtype")
            if not alike or (tuple(like.shape), dtype_name(like.dtype)) != (shape, dtype):
                self.differ(path, found, like)
        buffer = io.BytesIO(self.read(index))
        array: Any = np.lib.format.read_array(buffer, allow_pickle=False)
        if kind == "key":
            array = jax.random.wrap_key_data(jnp.asarray(array), impl=entry["impl"])
        elif is_extension(np.dtype(dtype)):
            array = array.view(np.dtype(dtype))
        if (array.shape, dtype_name(array.dtype)) != (shape, dtype):
            raise CheckpointError(f"{path} of {self.path} should be {found}, and is not.")
        if kind == "numpy scalar":
            return array[()]
        if kind != "jax":
            return array
        value = jnp.asarray(array)
        if value.dtype != array.dtype:
            raise CheckpointError(
                f"{path} of {self.path} is {found}, and JAX has 64-bit types turned off. Turn them"
                ' on before loading: jax.config.update("jax_enable_x64", True).'
            )
        return value

    def differ(self, path: str, found: str, like: Any) -> NoReturn:
        raise CheckpointError(
            f"{path} differs: {self.path} holds {found}, and `like` has {_shown(like)}. It must be"
            " an object of the same structure as the one that was saved."
        )


def _category(value: Any) -> type:
    """What must agree between static values: of numbers and of dtypes, no more than that."""
    if type(value) in (int, float, complex):
        return complex
    return np.dtype if isinstance(value, np.dtype) else type(value)


def _shown(value: Any) -> str:
    """A value of `like`, or what stands for itself in a file, in a few words."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {dtype_name(value.dtype)}"
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return f"a {type(value).__name__} of length {len(value)}"
    if type(value) is dict:
        return f"a dict with keys {list(value)}"
    if callable(value) and not is_record(value):
        return f"the function {name_of(value) or described(value)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, np.dtype)):
        return repr(value)
    return f"a {name_of(type(value)) or described(type(value))}"
