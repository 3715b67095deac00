"""Types of arrays, and checks of arguments.

Dimensions are called `time`, `state`, `obs`, `input`, `sample` and `batch` everywhere. Messages of
checks state what was expected, what was passed, and the remedy. Shapes and types are checked on
every call. Values are checked where they are known, which is outside of `jax.jit`, and once: never
inside a scan.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Key
from numpy.typing import ArrayLike as ArrayLike

PRNGKey: TypeAlias = Key[Array, ""]
Scalar: TypeAlias = Float[Array, ""]
State: TypeAlias = Float[Array, "state"]
Input: TypeAlias = Float[Array, "input"]
Value: TypeAlias = Float[Array, "out"]
"""A value of a kernel: a state or an observation."""


def is_concrete(value: Any) -> bool:
    """Return whether the value is known, rather than traced by a transformation."""
    return not isinstance(value, Tracer)


def where_rows(condition: Array, rows: Array, other: Any) -> Array:
    """Return the rows of an array for which a condition holds, and `other` in the remaining ones.

    Args:
        condition: a mask over the leading axes of the rows.
        rows: the array.
        other: a number, or an array that broadcasts against the rows.
    """
    axes = condition.shape + (1,) * (rows.ndim - condition.ndim)
    return jnp.where(condition.reshape(axes), rows, other)


def known_values(value: Any) -> np.ndarray | None:
    """Return the values of an array, or `None` if they are traced or on other processes."""
    if not is_concrete(value):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return np.asarray(value)


def as_real_array(value: Any, name: str, *, missing: bool = False) -> Array:
    """Convert an argument to a real floating-point array.

    Constructors and functions convert their numbers here. Accepted are arrays of JAX, NumPy and
    xarray, masked arrays, frames and series of pandas and polars, nested lists and numbers.
    float32 and float64 keep their type, if it is enabled; integers, booleans and narrower types
    become the default floating type.

    Args:
        value: the object to convert.
        name: the name of the argument, for messages.
        missing: whether entries may be missing: masked, or null in a frame. They become NaN.

    Raises:
        TypeError: if the value does not hold real numbers.
        ValueError: if an entry is masked or null and `missing` is false.
    """
    array = value if isinstance(value, jax.Array) else _as_numpy(value, name, missing)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(
            f"{name} must be real, got dtype {array.dtype}. Stack real and imaginary parts as two"
            " coordinates."
        )
    real = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
    if not real and array.dtype != np.bool_:
        kind = "" if isinstance(value, (jax.Array, np.ndarray)) else f"{type(value).__name__} of "
        raise TypeError(f"{name} must be an array of numbers, got {kind}dtype {array.dtype}.")
    if array.dtype in (np.float32, np.float64) and isinstance(array, jax.Array):
        return array
    dtype = None if array.dtype in (np.float32, np.float64) else jnp.result_type(float)
    if isinstance(array, Tracer):
        return array.astype(dtype)
    if isinstance(array, jax.Array):
        with jax.ensure_compile_time_eval():
            return array.astype(dtype)
    return on_device(array, array.dtype.newbyteorder("=") if dtype is None else dtype)


def on_device(array: np.ndarray, dtype: Any = None) -> Array:
    """Copy a NumPy array to the default device.

    It is not traced inside `jax.jit` either, so that its values can still be checked. Unlike
    `jnp.array`, it compiles no program for each shape, which takes longer than the copy. The user
    may change a NumPy array later, which is why it is copied.
    """
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.array(array, dtype))


def on_host(*values: Any) -> bool:
    """Return whether all values are known, and in memory that NumPy reads without a copy."""
    for value in values:
        if not is_concrete(value):
            return False
        if isinstance(value, jax.Array) and value.devices() != {jax.local_devices()[0]}:
            return False
    return jax.default_backend() == "cpu"


def as_boolean_array(value: Any, name: str, shape: tuple[int, ...], of: str) -> Array:
    """Convert a mask to a boolean array; refuse one without the shape of the array named `of`."""
    array = value if isinstance(value, jax.Array) else _as_numpy(value, name, False)
    if array.dtype != np.bool_:
        raise TypeError(
            f"{name} must be boolean, true where an entry was observed, got dtype {array.dtype}."
        )
    if array.shape != shape:
        raise ValueError(f"{name} must have the shape of {of}, {shape}, got {array.shape}.")
    return array if isinstance(array, jax.Array) else on_device(array)


def _as_numpy(value: Any, name: str, missing: bool) -> np.ndarray:
    """Return the values of anything that is not a JAX array."""
    try:
        array = _stacked(value)
        if not isinstance(array, np.ndarray):
            array = _of_columns(array) if hasattr(array, "to_numpy") else np.asarray(array)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be an array of numbers, got {type(value).__name__}."
        ) from error
    if not isinstance(array, np.ma.MaskedArray):
        return array
    if np.ma.is_masked(array):
        if not missing:
            where = tuple(int(i) for i in np.argwhere(np.ma.getmaskarray(array))[0])
            raise ValueError(f"{name} must not have missing entries, got one at index {where}.")
        if array.dtype.kind in "biu" or jnp.issubdtype(array.dtype, jnp.floating):
            narrow = array.dtype not in (np.float32, np.float64)
            return np.ma.filled(array.astype(float) if narrow else array, np.nan)
    return array.data


def _stacked(value: Any) -> Any:
    """Stack lists of masked arrays, whose masks `numpy.asarray` would drop."""
    if not isinstance(value, (list, tuple)):
        return value
    parts = [_stacked(part) for part in value]
    return np.ma.stack(parts) if any(isinstance(p, np.ma.MaskedArray) for p in parts) else value


def _of_columns(frame: Any) -> np.ndarray:
    """Return the values of a frame or series of pandas or polars, or of an array of xarray."""
    types: Any = getattr(frame, "dtypes", None)
    types = list(types) if hasattr(types, "__iter__") else [getattr(frame, "dtype", None)]
    named = [kind for kind in types if hasattr(kind, "is_numeric")]
    if not all(kind.is_numeric() or str(kind) == "Boolean" for kind in named):
        # polars would cast dates to numbers beside columns of numbers.
        raise TypeError(f"expected columns of numbers, got {types}")
    if any(getattr(kind, "na_value", None) is not None for kind in types):
        # Nullable types of pandas become arrays of objects where an entry is null.
        if any(getattr(kind, "kind", "O") not in "biuf" for kind in types):
            raise TypeError(f"expected columns of numbers, got {types}")
        values = frame.to_numpy(dtype=float, na_value=np.nan)
        return np.ma.masked_where(np.isnan(values), values)
    return np.asarray(frame.to_numpy())


def as_probabilities(value: Any, name: str) -> Array:
    """Convert probabilities to an array; refuse those not strictly between 0 and 1."""
    array = as_real_array(value, name)
    values = known_values(array)
    if values is not None and not np.all((values > 0) & (values < 1)):
        raise ValueError(f"{name} must be strictly between 0 and 1, got {values}.")
    return array


def check_rows(array: Array, name: str, columns: str, example: str) -> None:
    """Refuse an array that is not a nonempty table with one row per time step."""
    if array.ndim == 2 and 0 not in array.shape:
        return
    if array.ndim == 3:
        raise ValueError(
            f"{name} must have shape (time, {columns}), one series, got {array.shape}. For a batch"
            f" of series use jax.vmap: {example}."
        )
    hint = ""
    if array.ndim == 1:
        hint = (
            f" Use {name}[:, None] for a single column, or {name}.to_frame() if it is a series of"
            " pandas or polars."
        )
    empty = " The array is empty." if 0 in array.shape else ""
    raise ValueError(
        f"{name} must have shape (time, {columns}) with at least one row, got {array.shape}."
        f"{hint}{empty}"
    )


def check_finite(array: Array, name: str, *, allow_nan: bool = False) -> None:
    """Refuse infinite values, and NaN unless it marks a missing entry."""
    if not is_concrete(array):
        return
    values = known_values(array)
    if values is None:
        if (jnp.isinf(array) if allow_nan else ~jnp.isfinite(array)).any():
            raise ValueError(f"{name} must be finite in every process.")
        return
    bad = np.isinf(values) if allow_nan else ~np.isfinite(values)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        missing = " A missing entry is NaN, or False in `mask`." if allow_nan else ""
        raise ValueError(f"{name} must be finite, got {values[where]} at index {where}.{missing}")


def check_key(key: Any, owner: str) -> None:
    """Refuse anything but one typed key."""
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
    """Return a positive Python integer, for arguments that a shape depends on."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"{name} must be a Python integer, known when the program is traced, got"
            f" {type(value).__name__}."
        )
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
    return int(value)
