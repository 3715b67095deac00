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

from retrodict._validate import as_real_array, check_finite, check_rows, is_concrete

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
        length: how many rows exist; the rest is padding.
        takes_input: whether the model reads inputs.

    Raises:
        ValueError: if shapes do not fit, or values are infinite.
        TypeError: if an array is of the wrong type.
    """
    ys = as_real_array(ys, "ys")
    check_rows(ys, "ys", "obs", "jax.vmap(lambda ys: verb(model, ys))(ys_batch)")
    observed = _observed(ys, mask)
    count = prepare_length(length, ys.shape[0])
    if count is not None:
        exists = (jnp.arange(ys.shape[0]) < count)[:, None]
        observed = jnp.broadcast_to(exists, ys.shape) if observed is None else observed & exists
    if observed is not None:
        ys = jnp.where(observed, ys, 0.0)
    check_finite(ys, "ys", allow_nan=True)
    us = prepare_inputs(inputs, ys.shape[0], takes_input, count)
    return Series(ys, observed, us, count)


def prepare_length(length: Any, num_times: int) -> Int[Array, ""] | None:
    """The number of rows that exist as an array, checked to lie between 1 and `num_times`."""
    if length is None:
        return None
    count = jnp.asarray(length)
    if count.shape != () or not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(
            f"length must be one integer, got shape {count.shape} of dtype {count.dtype}."
        )
    if is_concrete(count) and not 1 <= int(count) <= num_times:
        raise ValueError(f"length must lie between 1 and {num_times} rows, got {int(count)}.")
    return count


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


def _observed(ys: Array, mask: Any | Literal[True]) -> Array | None:
    if mask is True:
        return None
    if mask is None:
        if is_concrete(ys) and not np.isnan(np.asarray(ys)).any():
            return None
        return ~jnp.isnan(ys)
    array = jnp.asarray(mask)
    if array.dtype != jnp.bool_:
        raise TypeError(
            f"mask must be boolean, true where an entry was seen, got dtype {array.dtype}."
        )
    if array.shape != ys.shape:
        raise ValueError(f"mask must have the shape of ys, {ys.shape}, got {array.shape}.")
    return array & ~jnp.isnan(ys)
