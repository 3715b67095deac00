"""Checks of what users pass in: what was expected, what came, and what to do.

Shapes and types are checked on every call. Values are checked where they are known, which is
outside of `jax.jit`, and once: never inside a scan.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array


def is_concrete(value: Any) -> bool:
    """Whether the value is known now, rather than traced by a transformation."""
    return not isinstance(value, Tracer)


def as_real_array(value: Any, name: str) -> Array:
    """An array of the default floating type or of its own; integers are cast, complex refused."""
    try:
        array = value if isinstance(value, jax.Array) else jnp.asarray(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be an array of numbers, got {type(value).__name__}."
        ) from error
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(
            f"{name} must be real, got dtype {array.dtype}. Stack real and imaginary parts as two"
            " coordinates."
        )
    if jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == jnp.bool_:
        return array.astype(jnp.result_type(float))
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be an array of numbers, got dtype {array.dtype}.")
    return array


def check_rows(array: Array, name: str, columns: str, example: str) -> None:
    """Refuses an array that is not a nonempty table with one row a time step."""
    if array.ndim == 2 and array.shape[0] > 0:
        return
    if array.ndim == 3:
        raise ValueError(
            f"{name} must have shape (time, {columns}), one series, got {array.shape}. For a batch"
            f" of series use jax.vmap: {example}."
        )
    hint = f" Use {name}[:, None] for a single column." if array.ndim == 1 else ""
    empty = " The series is empty." if 0 in array.shape else ""
    raise ValueError(
        f"{name} must have shape (time, {columns}) with at least one row, got {array.shape}."
        f"{hint}{empty}"
    )


def check_finite(array: Array, name: str, *, allow_nan: bool = False) -> None:
    """Refuses infinite values, and NaN unless it stands for a missing entry."""
    if not is_concrete(array):
        return
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        bad = jnp.isinf(array) if allow_nan else ~jnp.isfinite(array)
        if bad.any():
            raise ValueError(f"{name} must be finite in every process.")
        return
    values = np.asarray(array)
    bad = np.isinf(values) if allow_nan else ~np.isfinite(values)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        missing = " A missing entry is NaN, or False in `mask`." if allow_nan else ""
        raise ValueError(f"{name} must be finite, got {values[where]} at index {where}.{missing}")


def check_key(key: Any, owner: str) -> None:
    """Refuses what is not one typed key."""
    remedy = f"{owner} expects one typed key, as from jax.random.key(0), got "
    if not isinstance(key, jax.Array):
        raise TypeError(f"{remedy}{type(key).__name__}.")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"{remedy}an array of dtype {key.dtype}. Wrap a raw key: jax.random.wrap_key_data(key)."
        )
    if key.shape != ():
        raise TypeError(f"{remedy}an array of keys of shape {key.shape}. Use jax.vmap over them.")


def check_count(value: Any, name: str) -> int:
    """A positive Python integer, needed where a shape depends on it."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"{name} must be a Python integer, known when the program is traced, got"
            f" {type(value).__name__}."
        )
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
    return int(value)
