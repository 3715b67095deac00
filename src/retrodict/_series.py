"""One series as the verbs see it: observations, what was seen of them, inputs and length.

Every verb that takes `ys` calls `prepare_series` first. A NaN becomes a masked entry with a
harmless fill before any arithmetic, because `where(isnan(y), 0, f(y))` has a NaN gradient.
"""

from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from retrodict._validate import (
    as_boolean_array,
    as_real_array,
    check_finite,
    check_rows,
    is_concrete,
    known_values,
)
from retrodict.distributed import automatic, to_hosts

T = TypeVar("T")


class Series(eqx.Module):
    """A prepared series.

    Attributes:
        ys: observations, finite everywhere; what was not seen holds zero.
        mask: true where an entry was seen at a time that exists; `None` if every entry was.
        inputs: the inputs, or `None`.
        length: how many rows exist, or `None` if all of them do.
    """

    ys: Float[Array, "time obs"]
    mask: Bool[Array, "time obs"] | None
    inputs: Float[Array, "time input"] | None
    length: Int[Array, ""] | None

    @property
    def num_times(self) -> int:
        """The number of rows, padding included."""
        return self.ys.shape[0]

    def exists(self) -> Bool[Array, "time"] | None:
        """Which rows exist; `None` if all of them do."""
        return None if self.length is None else jnp.arange(self.num_times) < self.length


def repeating_the_last(tree: T, exists: Bool[Array, "time"]) -> T:
    """The tree with rows that do not exist replaced by the last one that does."""
    last = jnp.sum(exists) - 1

    def repeat(leaf: Array) -> Array:
        return jnp.where(exists.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, leaf[last][None])

    return jax.tree.map(repeat, tree)


def prepare_series(
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    takes_input: bool = False,
) -> Series:
    """Checks one series and turns NaN and padding into a mask.

    Args:
        ys: observations, of shape `(time, obs)`; NaN where an entry is missing.
        mask: true where an entry was seen, of the shape of `ys`. `True` alone says that everything
            was seen and that no NaN need be looked for, which is quicker inside `jax.jit`.
        inputs: inputs, of shape `(time, input)`.
        length: how many rows exist, from 1 to the number of rows; the rest is padding. Traced by
            `jax.jit`, a length out of range cannot be refused: all observations become NaN then,
            and so does what is computed from them.
        takes_input: whether the model reads inputs.

    Raises:
        ValueError: if shapes do not fit, or values are infinite.
        TypeError: if an array is of the wrong type.
    """
    ys = as_real_array(ys, "ys", missing=True)
    check_rows(ys, "ys", "obs", "jax.vmap(lambda ys: verb(model, ys))(ys_batch)")
    observed = observed_entries(ys, mask)
    count = prepare_length(length, ys.shape[0])
    if count is not None:
        exists = (jnp.arange(ys.shape[0]) < count)[:, None]
        observed = jnp.broadcast_to(exists, ys.shape) if observed is None else observed & exists
    if observed is not None:
        ys = jnp.where(observed, ys, 0.0)
    check_finite(ys, "ys", allow_nan=True)
    us = prepare_inputs(inputs, ys.shape[0], takes_input, count)
    if count is not None and not is_concrete(count):
        count, ys, observed = _without_answer(count, ys, observed)
    return Series(ys, observed, us, count)


def _without_answer(count: Array, ys: Array, observed: Any) -> tuple[Array, Array, Array]:
    """Turn a traced length out of range into NaN observations, since it cannot be refused.

    No row would exist for a length below 1, and the evidence of nothing is 0: a plausible answer.
    """
    valid = (count >= 1) & (count <= ys.shape[0])
    ys = jnp.where(valid, ys, jnp.nan)
    return jnp.clip(count, 1, ys.shape[0]), ys, observed | ~valid


def prepare_length(length: Any, num_times: int) -> Int[Array, ""] | None:
    """Return the number of rows that exist, refused unless between 1 and `num_times` if known."""
    if length is None:
        return None
    count = length if isinstance(length, jax.Array) else np.asarray(length)
    if count.shape != () or not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(
            f"length must be one integer, got shape {count.shape} of dtype {count.dtype}."
        )
    if is_concrete(count) and not 1 <= int(count) <= num_times:
        raise ValueError(f"length must lie between 1 and {num_times} rows, got {int(count)}.")
    return jnp.asarray(count)


def prepare_inputs(
    inputs: Any, num_times: int, takes_input: bool, length: Int[Array, ""] | None = None
) -> Float[Array, "time input"] | None:
    """The inputs as an array, refused unless there is one row a time step and a kernel reads it.

    Rows from `length` on may hold anything; they are replaced by the first row, at which the
    kernels are sure to be defined.
    """
    if inputs is None:
        if takes_input:
            raise ValueError(
                "The model has a kernel with takes_input=True, so that inputs of shape"
                f" ({num_times}, input) are needed, got None."
            )
        return None
    if not takes_input:
        raise ValueError(
            "inputs were given, but no kernel of the model reads them. Build the kernel with"
            " takes_input=True or with an input_weight."
        )
    array = as_real_array(inputs, "inputs")
    check_rows(array, "inputs", "input", "jax.vmap over ys and inputs")
    if array.shape[0] != num_times:
        raise ValueError(
            f"inputs must have one row a time step, {num_times} rows, got {array.shape[0]}."
        )
    if length is not None:
        array = jnp.where((jnp.arange(num_times) < length)[:, None], array, array[0])
    check_finite(array, "inputs")
    return array


def prepare_batch(
    ys: Any, *, mask: Any, inputs: Any, length: Any, takes_input: bool, owner: str
) -> Series:
    """Check a batch of series as `prepare_series` checks one; its arrays lead with an axis `batch`.

    Arrays that lie on the devices of several processes are checked where they lie.

    Args:
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for a single series.
        mask: true where an entry was seen, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`, or `(time, input)` for all series.
        length: how many rows exist, one integer per series or one for all.
        takes_input: whether the model reads inputs.
        owner: the verb, for messages.

    Raises:
        ValueError: if shapes do not fit, or values are infinite.
        TypeError: if an array is of the wrong type.
    """
    ys, mask, inputs, length = automatic((ys, mask, inputs, length))
    values = as_real_array(ys, "ys", missing=True)
    if values.ndim not in (2, 3) or 0 in values.shape:
        raise ValueError(
            f"{owner} expects ys of shape (batch, time, obs), or (time, obs) for one series, got"
            f" shape {values.shape}."
        )
    seen = observed_entries(values, mask)
    if values.ndim == 2:
        values, seen = values[None], None if seen is None else seen[None]
    lengths = _lengths(length, *values.shape[:2])
    if lengths is not None:
        exists = (np.arange(values.shape[1])[None] < lengths[:, None])[:, :, None]
        seen = jnp.broadcast_to(exists, values.shape) if seen is None else seen & exists
    values = values if seen is None else jnp.where(seen, values, 0.0)
    check_finite(values, "ys", allow_nan=True)
    return jax.vmap(Series)(
        values,
        None if seen is None or seen.all() else seen,
        _batch_of_inputs(inputs, values.shape[:2], lengths, takes_input, owner),
        None if lengths is None else jnp.asarray(lengths),
    )


def _lengths(length: Any, batch: int, time: int) -> np.ndarray | None:
    if length is None:
        return None
    lengths = np.asarray(to_hosts(length))
    if not np.issubdtype(lengths.dtype, np.integer) or lengths.shape not in ((), (batch,)):
        raise TypeError(
            f"length must be one integer, or one per series, of which there are {batch}, got shape"
            f" {lengths.shape} of dtype {lengths.dtype}."
        )
    if lengths.min() < 1 or lengths.max() > time:
        raise ValueError(
            f"length must lie between 1 and {time} rows, got {lengths.min()} to {lengths.max()}."
        )
    return np.broadcast_to(lengths, (batch,))


def _batch_of_inputs(
    inputs: Any,
    shape: tuple[int, ...],
    lengths: np.ndarray | None,
    takes_input: bool,
    owner: str,
) -> Array | None:
    if (inputs is not None) != takes_input:
        needs = "needs inputs, and none were given" if takes_input else "reads no inputs"
        raise ValueError(f"{owner}: the model {needs}.")
    if inputs is None:
        return None
    us = as_real_array(inputs, "inputs")
    if us.ndim not in (2, 3) or us.shape[:-1] not in (tuple(shape), tuple(shape[1:])):
        raise ValueError(
            f"inputs must have shape ({shape[0]}, {shape[1]}, input), or ({shape[1]}, input) for"
            f" all series, got {us.shape}."
        )
    us = jnp.broadcast_to(us, (*shape, us.shape[-1]))
    if lengths is not None:
        exists = jnp.arange(shape[1])[None] < lengths[:, None]
        us = jnp.where(exists[:, :, None], us, us[:, :1])
    check_finite(us, "inputs")
    return us


def observed_entries(ys: Array, mask: Any | Literal[True], name: str = "ys") -> Array | None:
    """Return where an entry was seen, as a mask of the shape of `ys`; `None` if everywhere.

    Args:
        ys: observations, NaN where an entry is missing.
        mask: true where an entry was seen; `True` alone promises that every entry was.
        name: the name of the observations, for messages.

    Raises:
        ValueError: if the mask has another shape, or promises that NaN was seen.
        TypeError: if the mask is not boolean.
    """
    if mask is True:
        _check_promise(ys, name)
        return None
    if mask is None:
        values = known_values(ys)
        return None if values is not None and not np.isnan(values).any() else ~jnp.isnan(ys)
    return as_boolean_array(mask, "mask", ys.shape, name) & ~jnp.isnan(ys)


def convert_row(y: Any, mask: Any, inputs: Any) -> tuple[Array, Array | None]:
    """Convert one row that a user passed to arrays: the observation, NaN where missing, and input.

    Verbs that read a stream call it outside of their compiled programs, where values are known.

    Args:
        y: the observation, of shape `(obs,)`; NaN where an entry is missing.
        mask: true where an entry was observed; `True` alone promises that every entry was.
        inputs: the input, of shape `(input,)`, or `None`.

    Raises:
        ValueError: if shapes do not fit, or values are infinite.
        TypeError: if an array is of the wrong type.
    """
    y = as_real_array(y, "y", missing=True)
    if y.ndim != 1:
        raise ValueError(f"y must be one observation of shape (obs,), got shape {y.shape}.")
    if mask is True:
        _check_promise(y, "y")
    elif mask is not None:
        y = jnp.where(as_boolean_array(mask, "mask", y.shape, "y"), y, jnp.nan)
    check_finite(y, "y", allow_nan=True)
    if inputs is not None:
        inputs = as_real_array(inputs, "inputs")
        if inputs.ndim != 1:
            raise ValueError(
                f"inputs must be the input of one row, of shape (input,), got shape {inputs.shape}."
            )
        check_finite(inputs, "inputs")
    return y, inputs


def _check_promise(ys: Array, name: str) -> None:
    """Refuse `mask=True` beside a known NaN."""
    values = known_values(ys)
    if values is not None and np.isnan(values).any():
        raise ValueError(
            f"mask=True promises that nothing is missing, and {name} holds NaN. Leave mask out: NaN"
            " then stands for a missing entry."
        )
