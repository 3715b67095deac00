"""One record of data, and the only validation of `ys`, `mask`, `inputs` and `length`.

Every function calls `prepare_series`, `prepare_batch` or `prepare_row` first, or one of those that
check against a model or a family and call these. A NaN becomes a masked entry with a finite fill
before any arithmetic, because `where(isnan(y), 0, f(y))` has a NaN gradient.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._arrays import (
    as_boolean_array,
    as_real_array,
    check_finite,
    check_rows,
    is_concrete,
    known_values,
    on_device,
    on_host,
    where_rows,
)
from retrodict.distributed import automatic, to_hosts

T = TypeVar("T")


class Series(eqx.Module):
    """A validated series: observations, mask, inputs and length.

    `StateSpaceModel.series` makes one. The record of a batch has a leading axis `batch` in every
    array, and the record of a single row has no axis `time`. Functionals read `Series` as their
    `data`: `data.ys` is the observation of one time, of shape `(obs,)`.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> series = model.series(jnp.array([[1.0], [jnp.nan]]))
        >>> series.ys.tolist(), series.mask.tolist()
        ([[1.0], [0.0]], [[True], [False]])

    Attributes:
        ys: observations, finite everywhere, zero where an entry is missing.
        mask: true where an entry was observed at a time that exists; `None` if all entries were.
        inputs: the inputs, or `None`.
        length: the number of rows that exist, or `None` if all of them do.
    """

    ys: Float[Array, "*time obs"]
    mask: Bool[Array, "*time obs"] | None
    inputs: Float[Array, "*time input"] | None
    length: Int[Array, "*batch"] | None = None

    @property
    def num_times(self) -> int:
        """The number of rows of one series, padding included."""
        return self.ys.shape[0]

    @property
    def rows(self) -> "Series":
        """The record without its length, so that every array has one row per time step."""
        return Series(self.ys, self.mask, self.inputs)

    @property
    def num_series(self) -> int:
        """The number of series of a batch, padding included."""
        return self.ys.shape[0]

    def at(self, index: Any) -> "Series":
        """Return some of the series of a batch, or some of its `rows`, along the leading axis."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    def options(self) -> dict[str, Any]:
        """Return `mask`, `inputs` and `length` as keyword arguments, next to `ys`."""
        mask = True if self.mask is None else self.mask
        return {"mask": mask, "inputs": self.inputs, "length": self.length}

    def exists(self) -> Bool[Array, "time"] | None:
        """Return which rows exist; `None` if all of them do."""
        return None if self.length is None else jnp.arange(self.num_times) < self.length


def prepare_series(
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    takes_input: bool = False,
    obs_dim: int | None = None,
    input_dim: int | None = None,
) -> Series:
    """Validate one series and turn NaN and padding into a mask.

    Args:
        ys: observations, of shape `(time, obs)`; NaN where an entry is missing.
        mask: true where an entry was observed, of the shape of `ys`. `True` alone declares that
            all entries were and skips the search for NaN, which is quicker inside `jax.jit`.
        inputs: inputs, of shape `(time, input)`.
        length: the number of rows that exist, from 1 to the number of rows; the rest is padding. A
            traced length out of range cannot be refused: it turns all observations into NaN, and so
            everything that is computed from them.
        takes_input: whether the model or family takes inputs.
        obs_dim: the number of columns that `ys` must have, if it is known.
        input_dim: the number of columns that `inputs` must have, if it is known.

    Raises:
        ValueError: if shapes do not fit, or values are infinite.
        TypeError: if an array has the wrong type.
    """
    ys = as_real_array(ys, "ys", missing=True)
    check_rows(ys, "ys", "obs", "jax.vmap(lambda ys: function(model, ys))(ys_batch)")
    check_columns(ys, "ys", obs_dim)
    observed = _observed_entries(ys, mask, "ys")
    count = prepare_length(length, ys.shape[0])
    ys, observed = _fill(ys, observed, count)
    us = prepare_inputs(inputs, ys.shape[0], takes_input, count, input_dim)
    if count is not None and not is_concrete(count):
        # No row would exist for a length below 1. The evidence of no rows is 0, a plausible answer.
        valid = (count >= 1) & (count <= ys.shape[0])
        ys, observed = jnp.where(valid, ys, jnp.nan), observed | ~valid
        count = jnp.clip(count, 1, ys.shape[0])
    return Series(ys, observed, us, count)


def prepare_batch(
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    takes_input: bool = False,
    obs_dim: int | None = None,
    input_dim: int | None = None,
) -> Series:
    """Validate a batch of series; every array of the result has a leading axis `batch`.

    Arrays that are distributed over several processes are checked in place.

    Args:
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for a single series.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`, or `(time, input)` for all series.
        length: the number of rows that exist, one integer per series or one for all.
        takes_input: whether the model or family takes inputs.
        obs_dim: the number of columns that `ys` must have, if it is known.
        input_dim: the number of columns that `inputs` must have, if it is known.

    Raises:
        ValueError: if shapes do not fit, or values are infinite.
        TypeError: if an array has the wrong type.
    """
    ys, mask, inputs, length = automatic((ys, mask, inputs, length))
    ys = as_real_array(ys, "ys", missing=True)
    if ys.ndim != 3:
        # One series is validated as by any other function, with the same messages.
        length = length[0] if np.shape(length) == (1,) else length
        series = prepare_series(
            ys,
            mask=mask,
            inputs=inputs,
            length=length,
            takes_input=takes_input,
            obs_dim=obs_dim,
            input_dim=input_dim,
        )
        series = jax.tree.map(lambda leaf: leaf[None], series)
        ys, observed, us, lengths = series.ys, series.mask, series.inputs, series.length
    else:
        if 0 in ys.shape:
            raise ValueError(
                "ys must have shape (batch, time, obs) with at least one series and one row, got"
                f" {ys.shape}."
            )
        check_columns(ys, "ys", obs_dim)
        count, num_times = ys.shape[:2]
        lengths = each = exists = None
        if length is not None:
            expected = f"one integer, or one per series ({count})"
            each = np.asarray(to_hosts(length))
            each = _as_lengths(each, num_times, expected, ((), (count,)))
            each = np.broadcast_to(each, (count,))
            lengths, exists = on_device(each), np.arange(num_times)[None] < each[:, None]
        ys, observed = _fill(ys, _observed_entries(ys, mask, "ys"), each)
        us = _prepare_inputs(inputs, (count, num_times), exists, takes_input, input_dim)
    if observed is not None and is_concrete(observed):
        entries = np.asarray(observed) if on_host(observed) else observed
        observed = None if entries.all() else observed
    return Series(ys, observed, us, lengths)


def prepare_row(
    y: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    takes_input: bool = False,
    obs_dim: int | None = None,
    input_dim: int | None = None,
) -> Series:
    """Validate one row of a stream; the result has no axis `time`, and always a mask.

    Args:
        y: the observation, of shape `(obs,)`; NaN where an entry is missing.
        mask: true where an entry was observed; `True` alone declares that all entries were.
        inputs: the input, of shape `(input,)`.
        takes_input: whether the model or family takes inputs.
        obs_dim: the number of entries that `y` must have, if it is known.
        input_dim: the number of entries that `inputs` must have, if it is known.

    Raises:
        ValueError: if shapes do not fit, or values are infinite.
        TypeError: if an array has the wrong type.
    """
    y, inputs = convert_row(y, mask, inputs)
    check_columns(y, "y", obs_dim)
    _check_presence(inputs, "(input,)", takes_input)
    check_columns(inputs, "inputs", input_dim)
    observed = ~jnp.isnan(y)
    return Series(jnp.where(observed, y, 0.0), observed, inputs)


def convert_row(y: Any, mask: Any, inputs: Any) -> tuple[Array, Array | None]:
    """Convert one row to arrays: the observation, NaN where an entry is missing, and the input.

    Functions that read a stream call it outside of their compiled programs, where values are known,
    and `prepare_row` inside of them.

    Args:
        y: the observation, of shape `(obs,)`; NaN where an entry is missing.
        mask: true where an entry was observed; `True` alone declares that all entries were.
        inputs: the input, of shape `(input,)`, or `None`.

    Raises:
        ValueError: if shapes do not fit, or values are infinite.
        TypeError: if an array has the wrong type.
    """
    y = as_real_array(y, "y", missing=True)
    if y.ndim != 1:
        raise ValueError(f"y must be one observation of shape (obs,), got shape {y.shape}.")
    observed = _observed_entries(y, mask, "y")
    y = y if observed is None else jnp.where(observed, y, jnp.nan)
    check_finite(y, "y", allow_nan=True)
    if inputs is not None:
        inputs = as_real_array(inputs, "inputs")
        if inputs.ndim != 1:
            raise ValueError(
                f"inputs must be one input of shape (input,), got shape {inputs.shape}."
            )
        check_finite(inputs, "inputs")
    return y, inputs


def prepare_length(length: Any, num_times: int) -> Int[Array, ""] | None:
    """Return the number of rows that exist, refused unless between 1 and `num_times` if known."""
    if length is None:
        return None
    count = length if isinstance(length, jax.Array) else np.asarray(length)
    count = _as_lengths(count, num_times, "one integer", ((),))
    return count if isinstance(count, jax.Array) else on_device(count)


def _as_lengths(
    lengths: Any, num_times: int, expected: str, shapes: tuple[tuple[int, ...], ...]
) -> Any:
    """Convert lengths to signed integers of 32 or 64 bits, which can count rows.

    Refused are those that are not integers of these shapes, or known not to be in range.
    """
    if lengths.shape not in shapes or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(
            f"length must be {expected}, got shape {lengths.shape} of dtype {lengths.dtype}."
        )
    values = known_values(lengths)
    if values is not None and not (1 <= values.min() and values.max() <= num_times):
        got = " to ".join(str(bound) for bound in sorted({int(values.min()), int(values.max())}))
        raise ValueError(f"length must be between 1 and {num_times} rows, got {got}.")
    return lengths if lengths.dtype in (np.int32, np.int64) else lengths.astype(np.int32)


def prepare_inputs(
    inputs: Any,
    num_times: int,
    takes_input: bool,
    length: Int[Array, ""] | None = None,
    input_dim: int | None = None,
) -> Float[Array, "time input"] | None:
    """Return the inputs of one series as an array, refused unless they have one row per time step.

    Rows from `length` on may hold anything. They are replaced by the first row, at which kernels
    are defined.
    """
    exists = None
    if inputs is not None and length is not None:
        exists = jnp.arange(num_times) < length
    return _prepare_inputs(inputs, (num_times,), exists, takes_input, input_dim)


def _prepare_inputs(
    inputs: Any, shape: tuple[int, ...], exists: Any, takes_input: bool, input_dim: int | None
) -> Array | None:
    """Return inputs of shape `(*shape, input)`, where `shape` is `(time,)` or `(batch, time)`."""
    _check_presence(inputs, f"({shape[-1]}, input)", takes_input)
    if inputs is None:
        return None
    us = as_real_array(inputs, "inputs")
    if us.ndim == 3 and len(shape) == 2:
        if us.shape[:2] != shape:
            raise ValueError(
                f"inputs must have shape ({shape[0]}, {shape[1]}, input), or ({shape[1]}, input)"
                f" for all series, got {us.shape}."
            )
    else:
        check_rows(us, "inputs", "input", "jax.vmap over ys and inputs")
        if us.shape[0] != shape[-1]:
            raise ValueError(
                f"inputs must have one row per time step, {shape[-1]} rows, got {us.shape[0]}."
            )
    check_columns(us, "inputs", input_dim)
    us = jnp.broadcast_to(us, (*shape, us.shape[-1]))
    if exists is not None:
        us = jnp.where(exists[..., None], us, us[..., :1, :])
    check_finite(us, "inputs")
    return us


def _check_presence(inputs: Any, shape: str, takes_input: bool) -> None:
    """Refuse missing inputs, and inputs that nothing reads."""
    if inputs is None and takes_input:
        raise ValueError(
            f"inputs must be given, of shape {shape}, since the model or family takes inputs; got"
            " None."
        )
    if inputs is not None and not takes_input:
        raise ValueError(
            "inputs must be left out, since the model or family takes no inputs. To take them,"
            " build a kernel with takes_input=True or an input_weight, and a family with input_dim."
        )


def check_columns(array: Array | None, name: str, expected: int | None) -> None:
    """Refuse an array whose last axis does not have the expected size; `None` expects nothing."""
    if array is not None and expected is not None and array.shape[-1] != expected:
        entries = "entries" if array.ndim == 1 else "columns"
        raise ValueError(
            f"{name} must have {expected} {entries}, got {array.shape[-1]}. The model or family"
            " fixes their number."
        )


def prepare_rows(data: PyTree, num_times: int) -> PyTree:
    """Convert the data of a functional to arrays with one row per time step, refused otherwise.

    The length of a `Series` is dropped: the length of the chain counts.
    """
    rows = jax.tree.map(jnp.asarray, data.rows if isinstance(data, Series) else data)
    for leaf in jax.tree.leaves(rows):
        if leaf.shape[:1] != (num_times,):
            raise ValueError(
                f"data must have one row per time step, {num_times} rows, got an array of shape"
                f" {leaf.shape}."
            )
    return rows


def repeat_last_row(tree: T, exists: Bool[Array, "time"]) -> T:
    """Replace the rows of a pytree that do not exist by the last one that does."""
    last = jnp.sum(exists) - 1
    return jax.tree.map(lambda leaf: where_rows(exists, leaf, leaf[last][None]), tree)


def fill_padding(tree: T, exists: Bool[Array, "time"] | None) -> T:
    """Replace the rows of a pytree that do not exist by its first row.

    Padding may hold NaN or a degenerate law. A `where` after the arithmetic would leave a NaN
    gradient.
    """
    if exists is None:
        return tree
    return jax.tree.map(lambda leaf: where_rows(exists, leaf, leaf[:1]), tree)


def _fill(ys: Array, observed: Array | None, length: Any) -> tuple[Array, Array | None]:
    """Mask rows that do not exist, put zero where nothing was observed, and refuse infinities."""
    if observed is not None or length is not None:
        ys, observed = _evaluate(_masked, ys, observed, length)
    check_finite(ys, "ys", allow_nan=True)
    return ys, observed


def _evaluate(function: Callable[..., Any], *arrays: Any) -> Any:
    """Call a function of a namespace and arrays: of NumPy on the host, else as one program.

    Outside of a compiled program JAX compiles every operation by itself, for every shape.
    """
    if not on_host(*arrays):
        return jax.jit(function, static_argnums=0)(jnp, *arrays)
    values = (None if array is None else np.asarray(array) for array in arrays)
    return jax.tree.map(on_device, function(np, *values))


def _masked(xp: Any, ys: Any, observed: Any, length: Any) -> tuple[Any, Any]:
    entries = xp.ones(ys.shape, bool) if observed is None else observed
    if length is not None:
        rows = np.arange(ys.shape[-2], dtype=length.dtype)
        rows = rows.reshape(*(1 for _ in ys.shape[:-2]), -1, 1)
        entries = entries & (rows < length[..., None, None])
    return xp.where(entries, ys, ys.dtype.type(0)), entries


def _not_nan(xp: Any, ys: Any, mask: Any) -> Any:
    return ~xp.isnan(ys) if mask is None else mask & ~xp.isnan(ys)


def _observed_entries(ys: Array, mask: Any, name: str) -> Array | None:
    """Return where an entry was observed, as a mask of the shape of `ys`; `None` if everywhere."""
    if mask is None or mask is True:
        values = known_values(ys)
        missing = None if values is None else bool(np.isnan(values).any())
        if mask and missing:
            raise ValueError(
                f"mask=True declares that nothing is missing, and {name} holds NaN. Leave mask out:"
                " NaN then marks a missing entry."
            )
        return None if mask or missing is False else _evaluate(_not_nan, ys, None)
    return _evaluate(_not_nan, ys, as_boolean_array(mask, "mask", ys.shape, name))
