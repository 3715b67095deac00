"""What files know of values: which objects are their fields, and what a dtype is called."""

import dataclasses
from typing import Any

import numpy as np

from retrodict._checkpoint.names import is_subclass


def is_record(value: Any) -> bool:
    """Whether a value is its fields."""
    return not isinstance(value, type) and is_record_class(type(value))


def is_record_class(cls: Any) -> bool:
    """Whether instances are: of dataclasses, such as modules, named tuples and distributions."""
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
    """Whether a dtype is one that numpy's format does not know, such as bfloat16."""
    return dtype.isbuiltin == 2


def dtype_name(dtype: Any) -> str:
    if not isinstance(dtype, np.dtype):
        return str(dtype)  # of keys
    plain = dtype.isnative and (dtype.kind in "biufc" or is_extension(dtype))
    return dtype.name if plain else dtype.str
