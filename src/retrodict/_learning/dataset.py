"""Datasets of series, and minibatches of them for the steps of training.

From data to a step of training:

1. `open_dataset` returns a dataset: series in arrays, of this process or sharded over several, or
   in blocks on disk (`on_disk.py`).
2. `dataset.loader(...)` returns a loader for one run of training.
3. `loader.load(first, count, then)` returns the batches that `count` steps read.
4. `batches.minibatch(key, step)` returns the series of one step, inside of the compiled program.

The series of a step depend on the key and the number of the step only. A fit that was interrupted
therefore resumes to the last bit.
"""

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from retrodict._arrays import PRNGKey, Scalar, known_values
from retrodict._model import AbstractModel, Series
from retrodict.distributed import (
    is_multi_process,
    map_shards,
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
        count = series.num_series if count is None else count
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
        if self.mesh is None and self.series.num_series == 1:
            # Without `vmap`, the covariances of a single series are computed until they settle.
            only = jax.tree.map(lambda leaf: leaf[0], (self.series, *per_series))
            return jax.tree.map(lambda leaf: leaf[None], fn(parameters, *only))
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
        return jnp.arange(self.series.num_series) < self.count

    def keys(self, key: PRNGKey) -> Key[Array, "batch"]:
        """Return one key per series, independent of the padding."""
        keys = jax.random.split(key, self.count)
        if self.count == self.series.num_series:
            return keys
        return keys[jnp.minimum(jnp.arange(self.series.num_series), self.count - 1)]

    def total(self, values: Float[Array, "batch"]) -> Scalar:
        """Return the sum of a value over the series that count."""
        if self.count == self.series.num_series:
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


class ArrayDataset(AbstractDataset):
    """Series in arrays, in the memory of this process or sharded over those of several.

    Args:
        series: the series, with a leading axis `batch`.
        count: the number of series that count; the rest is padding.
        mesh: the devices; `None` for one.
    """

    def __init__(self, series: Series, count: int, mesh: Mesh | None) -> None:
        size, self._is_shared = series.num_series, is_multi_process(series)
        if self._is_shared:
            if mesh is None or size % mesh.size:
                raise ValueError(
                    f"The {size} series are sharded over several processes and must have equal"
                    " shares: pass the mesh of all their devices, and a multiple of its size as"
                    " the number of series."
                )
            series = shard_over(series, mesh, P(mesh.axis_names))
        self._series, self._count, self._mesh = series, count, mesh
        self.num_times = series.ys.shape[1]
        self.num_rows = float(eqx.filter_jit(Minibatch.num_rows)(Minibatch(series, count)))

    def spaced(self, count: int) -> Series:
        """Return at most `count` series at equal distances."""
        if count >= self._count:
            return self.first(count)
        return self._at(spaced_indices(self._count, count))

    def first(self, count: int) -> Series:
        """Return the first series."""
        return self._at(slice(0, min(count, self._count)))

    def _at(self, index: Any) -> Series:
        """Return some of the series, in the memory of every process."""
        everything = isinstance(index, slice) and index.stop == self._series.num_series
        chosen = self._series if everything else self._series.at(index)
        return to_hosts(chosen) if self._is_shared else chosen

    def fingerprint(self) -> bytes:
        """Return the hashes of all series, of which each process computes its own."""
        if self._is_shared:
            hashes = map_shards(hash_series, self._series, hashlib.sha256().digest_size)
        else:
            hashes = hash_series(self._series)
        return hashes[: self._count].tobytes()

    def loader(
        self, key: PRNGKey, batch_size: int, chunk_size: int, axes: tuple[str, ...]
    ) -> "InMemoryBatches":
        """Return all series, from which each step draws its minibatch."""
        everything = Minibatch.on_devices(self._series, self._mesh, axes, self._count)
        return InMemoryBatches(everything, min(batch_size, self._count))


class InMemoryBatches(AbstractBatches, AbstractLoader):
    """All series, from which each step draws its minibatch; the same for all steps.

    Attributes:
        everything: all series, on one device or in equal shares on those of a mesh.
        batch_size: the number of series per step.
    """

    everything: Minibatch
    batch_size: int = eqx.field(static=True)

    def load(self, first: int, count: int, then: int | None) -> "InMemoryBatches":
        """Return all series."""
        return self

    def minibatch(self, key: PRNGKey, step: Int[Array, ""]) -> Minibatch:
        """Draw one series from each of `batch_size` equal parts of the data."""
        series, count = self.everything.series, self.everything.count
        mesh, axes = self.everything.mesh, self.everything.axes
        if self.batch_size == count:
            return self.everything
        index = draw_indices(key, step, count, self.batch_size)
        if mesh is None:
            return Minibatch(series.at(index), self.batch_size)
        shards = num_devices(mesh, axes)
        if series.num_series != count or count % shards or self.batch_size % shards:
            chosen = series.at(pad_to_multiple(index, shards))
            chosen = lax.with_sharding_constraint(chosen, NamedSharding(mesh, P(axes)))
            return Minibatch(chosen, self.batch_size, mesh, axes)

        # Parts of the data and shards end at the same series: nothing is sent between devices.
        def of_shard(series: Series, index: Array) -> Series:
            return series.at(index - count // shards * lax.axis_index(axes))

        spec = P(axes)
        chosen = jax.shard_map(of_shard, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        return Minibatch(chosen(series, index), self.batch_size, mesh, axes)


def draw_indices(key: PRNGKey, step: Any, count: int, batch_size: int) -> Int[Array, "batch"]:
    """Draw the series of one step: one from each of `batch_size` equal parts of the data.

    No series occurs twice in a minibatch, and each is as likely as the others of its part. Nothing
    is sorted: a permutation of 2048 series would take a tenth of a training step.

    Args:
        key: the key of the fit.
        step: the number of the step.
        count: the number of series.
        batch_size: the number of series per step, at most `count`.
    """
    # Two ranges instead of slices of one: a slice of a sharded array is sent between devices.
    begin = jnp.arange(batch_size) * count // batch_size
    end = jnp.arange(1, batch_size + 1) * count // batch_size
    return jax.random.randint(jax.random.fold_in(key, step), (batch_size,), begin, end)


def spaced_indices(count: int, size: int) -> Int[np.ndarray, "index"]:
    """Return at most `size` of the indices 0..count-1, at equal distances."""
    size = min(size, count)
    return np.arange(size) * count // size


def hash_series(series: Series) -> np.ndarray:
    """Return the SHA-256 of each series, one row per series."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(series)]
    rows = [b"".join(leaf[i].tobytes() for leaf in leaves) for i in range(len(leaves[0]))]
    return np.stack([np.frombuffer(hashlib.sha256(row).digest(), np.uint8) for row in rows])


def batch_for(
    model: AbstractModel,
    ys: Any,
    *,
    mask: Any,
    inputs: Any,
    length: Any,
    learner: str | None = None,
) -> Series:
    """Return the series of a batch, checked against an unwrapped model.

    Args:
        model: the model.
        ys: observations, as in `prepare_batch`, like the rest.
        mask: true where an entry was observed.
        inputs: inputs.
        length: the number of existing rows.
        learner: the calling function if it learns from the series, which needs observed entries.
    """
    batch = model.batch(ys, mask=mask, inputs=inputs, length=length)
    observed = None if batch.mask is None else known_values(batch.mask)
    if learner is not None and observed is not None and not observed.any():
        raise ValueError(f"{learner} expects observed entries in ys, got none: all are missing.")
    return batch
