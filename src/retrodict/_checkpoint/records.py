"""Records, which files store as their fields, and names of dtypes."""

import dataclasses
from typing import Any

import numpy as np

from retrodict._checkpoint.names import is_subclass


def is_record(value: Any) -> bool:
    """Return whether a value is stored as its fields."""
    return not isinstance(value, type) and is_record_class(type(value))


def is_record_class(cls: Any) -> bool:
    """Return whether instances are stored as their fields: dataclasses, named tuples, numpyro."""
    return (
        (isinstance(cls, type) and dataclasses.is_dataclass(cls))
        or (is_subclass(cls, tuple) and hasattr(cls, "_fields"))
        or (isinstance(cls, type) and cls.__module__.partition(".")[0] == "numpyro")
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
