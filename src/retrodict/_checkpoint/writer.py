"""Convert objects to JSON nodes and arrays."""

import enum
import functools
import hashlib
import io
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrodict._arrays import is_concrete
from retrodict._checkpoint.allowed import ENUM_NAMES, RECORD_NAMES, VALUE_NAMES
from retrodict._checkpoint.names import (
    described,
    dtype_name,
    fields_of,
    is_extension,
    is_record,
    name_of,
)


class Writer:
    """A converter of objects to JSON nodes, which collects their arrays.

    A node is null, a boolean, a number, a string, or a dict with one key, its kind. The node of a
    record has the keys `class` and `fields`.
    """

    def __init__(self) -> None:
        self.arrays: list[dict[str, Any]] = []
        self.members: list[bytes] = []

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is complex:
            return {"complex": [self.encode(part, path) for part in (value.real, value.imag)]}
        if kind in (list, tuple):
            items = [self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return {kind.__name__: items}
        if kind is dict:
            pairs = [
                [self.encode(key, f"a key of {path}"), self.encode(item, f"{path}[{key!r}]")]
                for key, item in value.items()
            ]
            return {"dict": pairs}
        if isinstance(value, (jax.Array, np.generic)) or kind is np.ndarray:
            return self.encode_array(value, path)
        if isinstance(value, np.dtype):
            return {"dtype": dtype_name(value)}
        if kind in (functools.partial, jax.tree_util.Partial):
            parts = (value.func, value.args, dict(value.keywords))
            return {"partial": [kind.__module__, *(self.encode(part, path) for part in parts)]}
        if isinstance(value, enum.Enum) and (name := name_of(kind, ENUM_NAMES)):
            return {"enum": [name, value.name]}
        if is_record(value):
            return self.encode_record(value, path)
        if callable(value):
            name = name_of(value, VALUE_NAMES)
            return {"name": name} if name else {"callable": described(value)}
        raise TypeError(
            f"{path} is of type {kind.__module__}.{kind.__qualname__}, which cannot be saved."
            " Modules of equinox, containers, arrays, numbers, strings and functions can."
        )

    def encode_record(self, value: Any, path: str) -> Any:
        count = len(self.arrays)
        try:
            fields = {
                name: self.encode(item, f"{path}.{name}") for name, item in fields_of(value).items()
            }
        except TypeError:
            # The result of eqx.filter_jit is a module with compiled programs: store a function.
            if callable(value) and type(value).__module__.startswith("equinox._"):
                del self.arrays[count:], self.members[count:]
                return {"callable": described(value)}
            raise
        name = name_of(type(value), RECORD_NAMES) or described(type(value))
        return {"class": name, "fields": fields}

    def encode_array(self, value: Any, path: str) -> Any:
        if not is_concrete(value):
            raise TypeError(f"{path} is traced and has no value: save outside of jax.jit.")
        entry = {"path": path, "shape": list(value.shape), "dtype": dtype_name(value.dtype)}
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            entry |= {"kind": "key", "impl": str(jax.random.key_impl(value))}
            value = jax.random.key_data(value)
        elif isinstance(value, jax.Array):
            entry["kind"] = "jax"
        else:
            entry["kind"] = "numpy" if isinstance(value, np.ndarray) else "numpy scalar"
        array = np.asarray(value, order="C")
        if array.dtype.hasobject or array.dtype.names or not array.dtype.itemsize:
            raise TypeError(f"{path} has dtype {array.dtype}, which cannot be saved.")
        if is_extension(array.dtype):
            array = array.view(f"u{array.dtype.itemsize}")
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, array, allow_pickle=False)
        data = buffer.getvalue()
        self.arrays.append(entry | {"sha256": hashlib.sha256(data).hexdigest()})
        self.members.append(data)
        return {"array": len(self.arrays) - 1}
