"""Batches of series: checking them, and choosing what a step sees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from retrodict._devices import automatic, is_spread, to_hosts
from retrodict._mask import Series
from retrodict._model import StateSpaceModel, prepare_data
from retrodict._types import PRNGKey
from retrodict._validate import as_real_array, check_finite


def batch_for(
    model: StateSpaceModel, ys: Any, *, mask: Any, inputs: Any, length: Any, owner: str
) -> Series:
    """The series of a batch, checked against an unwrapped model as one series is.

    Args:
        model: the model.
        ys: as in `prepare_batch`, like the rest.
        mask: true where an entry was seen.
        inputs: inputs.
        length: how many rows exist.
        owner: who asks, for messages.
    """
    batch = prepare_batch(
        ys, mask=mask, inputs=inputs, length=length, takes_input=model.takes_input, owner=owner
    )
    first = take(batch, 0)
    first = to_hosts(first) if is_spread(first) else first
    prepare_data(model, first.ys, inputs=first.inputs)
    return batch


def prepare_batch(
    ys: Any, *, mask: Any, inputs: Any, length: Any, takes_input: bool, owner: str
) -> Series:
    """A `Series` whose arrays have a leading axis `batch`.

    Arrays that lie on the devices of several processes are checked where they lie.

    Args:
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for a single series.
        mask: true where an entry was seen, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)` or `(time, input)`.
        length: how many rows exist, one integer a series or one for all.
        takes_input: whether the model reads inputs.
        owner: who asks, for messages.
    """
    ys, mask, inputs, length = automatic((ys, mask, inputs, length))
    values = as_real_array(ys, "ys")
    if values.ndim not in (2, 3) or 0 in values.shape:
        raise ValueError(
            f"{owner} expects ys of shape (batch, time, obs), or (time, obs) for one series, got"
            f" shape {values.shape}."
        )
    single = values.ndim == 2
    values = values[None] if single else values
    check_finite(values, "ys", allow_nan=True)
    host = jnp if is_spread(values) else np
    seen = ~host.isnan(host.asarray(values))
    if mask is not None and mask is not True:
        given = host.asarray(mask)
        given = given[None] if single and given.ndim == 2 else given
        if given.dtype != np.bool_ or given.shape != values.shape:
            raise ValueError(
                f"mask must be boolean of the shape of ys, {values.shape}, got shape {given.shape}"
                f" of dtype {given.dtype}."
            )
        seen = seen & given
    elif mask is True and not seen.all():
        raise ValueError("mask=True promises that nothing is missing, and ys holds NaN.")
    lengths = _lengths(length, values.shape[0], values.shape[1])
    if lengths is not None:
        seen = seen & (np.arange(values.shape[1])[None] < lengths[:, None])[:, :, None]
    missing = not seen.all()
    return jax.vmap(Series)(
        jnp.where(seen, values, 0.0) if missing else values,
        jnp.asarray(seen) if missing else None,
        _inputs(inputs, values.shape[:2], lengths, single, takes_input, owner),
        None if lengths is None else jnp.asarray(lengths),
    )


def _lengths(length: Any, batch: int, time: int) -> np.ndarray | None:
    if length is None:
        return None
    lengths = np.asarray(to_hosts(length))
    if not np.issubdtype(lengths.dtype, np.integer) or lengths.shape not in ((), (batch,)):
        raise TypeError(
            f"length must be one integer or {batch} of them, got shape {lengths.shape} of dtype"
            f" {lengths.dtype}."
        )
    if lengths.min() < 1 or lengths.max() > time:
        raise ValueError(
            f"lengths must lie between 1 and {time} rows, got {lengths.min()} to {lengths.max()}."
        )
    return np.broadcast_to(lengths, (batch,))


def _inputs(
    inputs: Any,
    shape: tuple[int, ...],
    lengths: np.ndarray | None,
    single: bool,
    takes_input: bool,
    owner: str,
) -> Array | None:
    if (inputs is not None) != takes_input:
        needs = "needs inputs, and none were given" if takes_input else "reads no inputs"
        raise ValueError(f"{owner}: the model {needs}.")
    if inputs is None:
        return None
    us = as_real_array(inputs, "inputs")
    us = us[None] if single and us.ndim == 2 else us
    if us.ndim != 3 or us.shape[:2] != tuple(shape):
        raise ValueError(f"inputs must have shape ({shape[0]}, {shape[1]}, input), got {us.shape}.")
    if lengths is not None:
        exists = jnp.arange(shape[1])[None] < lengths[:, None]
        us = jnp.where(exists[:, :, None], us, us[:, :1])
    check_finite(us, "inputs")
    return us


def num_series(batch: Series) -> int:
    """How many series a batch holds."""
    return batch.ys.shape[0]


def num_rows(batch: Series) -> Any:
    """How many rows exist in all its series."""
    if batch.length is None:
        return batch.ys.shape[0] * batch.ys.shape[1]
    return jnp.sum(batch.length)


def take(batch: Series, index: Any) -> Series:
    """Some of the series of a batch."""
    return jax.tree.map(lambda leaf: leaf[index], batch)


def first_rows(batch: Series, count: int) -> Series:
    """The first rows of every series."""
    return jax.vmap(Series)(
        batch.ys[:, :count],
        None if batch.mask is None else batch.mask[:, :count],
        None if batch.inputs is None else batch.inputs[:, :count],
        None if batch.length is None else jnp.minimum(batch.length, count),
    )


def minibatch(key: PRNGKey, step: Any, num_series: int, batch_size: int) -> Int[Array, "batch"]:
    """The series of one step: one drawn from each of `batch_size` equal parts of the data.

    No series comes twice in a batch, each is as likely as any other of its part, and nothing is
    sorted: a fresh order of 2048 series would take a tenth of a training step.

    Args:
        key: the key of the whole training.
        step: the number of the step.
        num_series: how many series there are.
        batch_size: how many of them a step sees, at most `num_series`.
    """
    # Two ranges and no slices of one: spread over devices, a slice would be sent around.
    begin = jnp.arange(batch_size) * num_series // batch_size
    end = jnp.arange(1, batch_size + 1) * num_series // batch_size
    return jax.random.randint(jax.random.fold_in(key, step), (batch_size,), begin, end)
