"""Datasets: the one way from series to the minibatch of a training step.

`open_dataset` returns a dataset, `dataset.loader(...)` a loader for one run of training,
`loader.load(first, count, then)` the arrays that `count` steps read, and
`batches.minibatch(key, step)` the series of one step, inside of the compiled program. The three
implementations are `in_memory.py`, `on_disk.py` and `shared.py`.

The series of a step depend on the key and the number of the step only. A fit that was interrupted
therefore resumes to the last bit.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from retrodict._model import StateSpaceModel, prepare_data
from retrodict._series import Series, prepare_batch
from retrodict._types import PRNGKey, Scalar
from retrodict.distributed import (
    is_multi_process,
    num_devices,
    pad_to_multiple,
    shard_over,
    to_hosts,
)


class Minibatch(eqx.Module):
    """Several series and the number of them that count.

    Attributes:
        series: the series, with a leading axis `batch`.
        count: the number of series that count. The others repeat the last one, so that every device
            holds equally many, and contribute nothing.
        mesh: the devices; `None` for one.
        axes: the axes of the mesh over which the series are sharded.
    """

    series: Series
    count: int = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True, default=None)
    axes: tuple[str, ...] = eqx.field(static=True, default=())

    @classmethod
    def on_devices(
        cls,
        series: Series,
        mesh: Mesh | None = None,
        axes: tuple[str, ...] = (),
        count: int | None = None,
    ) -> "Minibatch":
        """Return a minibatch of all series, or the first `count`, padded and sharded over axes."""
        count = num_series(series) if count is None else count
        if mesh is not None:
            series = shard_over(pad_to_multiple(series, num_devices(mesh, axes)), mesh, P(axes))
        return cls(series, count, mesh, axes)

    def each(self, fn: Callable[..., Any], parameters: PyTree, *per_series: PyTree) -> Any:
        """Evaluate a function of the parameters and one series for every series.

        Each device works on a copy of the parameters, and the gradients of the copies are summed
        once. Without copies the compiler would reduce gradients over devices at every row of the
        series, inside of the backward loop.

        Args:
            fn: `fn(parameters, series, *per_series)`.
            parameters: arrays that all series share.
            *per_series: further arguments, with a leading axis `batch`.
        """
        over_series = jax.vmap(fn, in_axes=(None, *(0 for _ in (self.series, *per_series))))
        if self.mesh is None:
            return over_series(parameters, self.series, *per_series)
        shards = num_devices(self.mesh, self.axes)
        sharding = NamedSharding(self.mesh, P(self.axes))

        def copy(leaf: Array) -> Array:
            return jnp.broadcast_to(leaf[None], (shards, *leaf.shape))

        def split(leaf: Array) -> Array:
            return leaf.reshape(shards, -1, *leaf.shape[1:])

        arguments = (
            jax.tree.map(copy, parameters),
            *jax.tree.map(split, (self.series, *per_series)),
        )
        values = jax.vmap(over_series)(*lax.with_sharding_constraint(arguments, sharding))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), values)

    def counts(self) -> Bool[Array, "batch"]:
        """Return which of the series count."""
        return jnp.arange(num_series(self.series)) < self.count

    def keys(self, key: PRNGKey) -> Key[Array, "batch"]:
        """Return one key per series, independent of the padding."""
        keys = jax.random.split(key, self.count)
        if self.count == num_series(self.series):
            return keys
        return keys[jnp.minimum(jnp.arange(num_series(self.series)), self.count - 1)]

    def total(self, values: Float[Array, "batch"]) -> Scalar:
        """Return the sum of a value over the series that count."""
        if self.count == num_series(self.series):
            return jnp.sum(values)
        return jnp.sum(jnp.where(self.counts(), values, 0.0))

    def num_rows(self, begin: Any = 0, end: Any = None) -> Any:
        """Return the number of existing rows from `begin` on and before `end`, of all series."""
        end = self.series.ys.shape[1] if end is None else end
        if self.series.length is None:
            return self.count * (end - begin)
        rows = jnp.clip(self.series.length, begin, end) - begin
        return jnp.sum(jnp.where(self.counts(), rows, 0))

    def first_rows(self, count: int) -> "Minibatch":
        """Return the same series without the rows from `count` on."""
        rows = jax.tree.map(lambda leaf: leaf[:, :count], self.series.rows)
        length = self.series.length
        length = None if length is None else jnp.minimum(length, count)
        return dataclasses.replace(self, series=dataclasses.replace(rows, length=length))


class AbstractBatches(eqx.Module):
    """The arrays from which some steps read their minibatches, an argument of compiled programs."""

    @abstractmethod
    def minibatch(self, key: PRNGKey, step: Int[Array, ""]) -> Minibatch:
        """Return the series of a step."""


class AbstractLoader(ABC):
    """The minibatches of one run of training.

    Attributes:
        steps_per_load: the largest number of steps per call of `load`; `None` for no limit.
    """

    steps_per_load: int | None = None

    @abstractmethod
    def load(self, first: int, count: int, then: int | None) -> AbstractBatches:
        """Return the batches of steps first..first+count-1.

        Args:
            first: the first step.
            count: the number of steps.
            then: the first step of the next call, to read ahead; `None` if there is none.
        """

    def close(self) -> None:  # noqa: B027  (most loaders hold nothing)
        """Release threads and files."""


class AbstractDataset(ABC):
    """Series to train on, checked against a model.

    Attributes:
        num_times: the number of rows of each series, padding included.
        num_rows: the number of existing rows of all series.
    """

    num_times: int
    num_rows: float

    @abstractmethod
    def spaced(self, count: int) -> Series:
        """Return at most `count` series at equal distances, the same in every process."""

    @abstractmethod
    def first(self, count: int) -> Series:
        """Return at most `count` fixed series, the same in every process."""

    @abstractmethod
    def fingerprint(self) -> bytes:
        """Return a fingerprint of the data."""

    @abstractmethod
    def loader(
        self, key: PRNGKey, batch_size: int, chunk_size: int, axes: tuple[str, ...]
    ) -> AbstractLoader:
        """Return a loader for one run of training.

        Args:
            key: the key of the fit.
            batch_size: the number of series per step; all of them if there are fewer.
            chunk_size: the number of steps between two evaluations.
            axes: the axes of the mesh over which minibatches are sharded.
        """


def batch_for(
    model: StateSpaceModel, ys: Any, *, mask: Any, inputs: Any, length: Any, owner: str
) -> Series:
    """Return the series of a batch, checked against an unwrapped model.

    Args:
        model: the model.
        ys: observations, as in `prepare_batch`, like the rest.
        mask: true where an entry was observed.
        inputs: inputs.
        length: the number of existing rows.
        owner: the calling verb, for messages.
    """
    batch = prepare_batch(
        ys, mask=mask, inputs=inputs, length=length, takes_input=model.takes_input
    )
    first = take(batch, 0)
    first = to_hosts(first) if is_multi_process(first) else first
    prepare_data(model, first.ys, inputs=first.inputs)
    return batch


def num_series(batch: Series) -> int:
    """Return the number of series in a batch."""
    return batch.ys.shape[0]


def take(batch: Series, index: Any) -> Series:
    """Return some of the series of a batch."""
    return jax.tree.map(lambda leaf: leaf[index], batch)


def options_of(series: Series) -> dict[str, Any]:
    """Return the keyword arguments that describe a prepared series to a verb."""
    mask = True if series.mask is None else series.mask
    return {"mask": mask, "inputs": series.inputs, "length": series.length}
