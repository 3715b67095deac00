"""Batches of series: checking them, and choosing what a step sees."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from retrodict._model import StateSpaceModel, prepare_data
from retrodict._series import Series, prepare_batch
from retrodict._types import PRNGKey
from retrodict.distributed import is_spread, to_hosts


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
        ys, mask=mask, inputs=inputs, length=length, takes_input=model.takes_input
    )
    first = take(batch, 0)
    first = to_hosts(first) if is_spread(first) else first
    prepare_data(model, first.ys, inputs=first.inputs)
    return batch


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
