"""Where the series of a step come from, and how they lie on devices."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from retrodict._learning.batch import first_rows, minibatch, take
from retrodict._series import Series
from retrodict._types import PRNGKey, Scalar
from retrodict.distributed import fill_up, lay, num_devices


class Batch(eqx.Module):
    """Series side by side, and how many of them count.

    Attributes:
        series: the series, with a leading axis `batch`.
        count: how many are meant. Those after them repeat the last one, so that every device has as
            many as any other, and count nothing.
        mesh: the devices; `None` for one.
        axes: over which axes of the mesh the series lie.
    """

    series: Series
    count: int = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True, default=None)
    axes: tuple[str, ...] = eqx.field(static=True, default=())

    def each(self, fn: Callable[..., Any], parameters: PyTree, *per_series: PyTree) -> Any:
        """What a function of parameters and of one series finds for every series.

        Each device works on a copy of the parameters. Their gradients then meet once, when the
        copies do: without copies the compiler would reduce them over devices at every row of the
        series, inside of the backward loop.

        Args:
            fn: `fn(parameters, series, *per_series)`.
            parameters: arrays that are the same for all.
            *per_series: what else there is for each series, with a leading axis `batch`.
        """
        over_series = jax.vmap(fn, in_axes=(None, *(0 for _ in (self.series, *per_series))))
        if self.mesh is None:
            return over_series(parameters, self.series, *per_series)
        shares = num_devices(self.mesh, self.axes)
        own = NamedSharding(self.mesh, P(self.axes))

        def split(leaf: Array) -> Array:
            return leaf.reshape(shares, -1, *leaf.shape[1:])

        copies = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf[None], (shares, *leaf.shape)), parameters
        )
        given = (copies, *jax.tree.map(split, (self.series, *per_series)))
        found = jax.vmap(over_series)(*lax.with_sharding_constraint(given, own))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found)

    def counts(self) -> Bool[Array, "batch"]:
        """Which of the series count."""
        return jnp.arange(self.series.ys.shape[0]) < self.count

    def keys(self, key: PRNGKey) -> Key[Array, "batch"]:
        """One key a series, the same whatever number of devices it is filled up for."""
        keys = jax.random.split(key, self.count)
        if self.count == self.series.ys.shape[0]:
            return keys
        return keys[jnp.minimum(jnp.arange(self.series.ys.shape[0]), self.count - 1)]

    def total(self, values: Float[Array, "batch"]) -> Scalar:
        """The sum of a value over the series that count."""
        if self.count == self.series.ys.shape[0]:
            return jnp.sum(values)
        return jnp.sum(jnp.where(self.counts(), values, 0.0))

    def num_rows(self, begin: Any = 0, end: Any = None) -> Any:
        """How many rows from `begin` on and before `end` exist in all."""
        end = self.series.ys.shape[1] if end is None else end
        if self.series.length is None:
            return self.count * (end - begin)
        rows = jnp.clip(self.series.length, begin, end) - begin
        return jnp.sum(jnp.where(self.counts(), rows, 0))

    def first_rows(self, count: int) -> "Batch":
        """The first rows of every series."""
        return dataclasses.replace(self, series=first_rows(self.series, count))


class AbstractSource(eqx.Module):
    """Series that a training draws from, as arrays that a compiled program is given."""

    @abstractmethod
    def draw(self, key: PRNGKey, step: Int[Array, ""]) -> Batch:
        """The series of a step, which depend on nothing but the key and the step."""


class InMemory(AbstractSource):
    """All series at once, on one device or in equal shares on those of a mesh.

    Attributes:
        series: the series, with a leading axis `batch`, filled up to equal shares.
        num_series: how many there are.
        batch_size: how many a step sees.
        mesh: the devices; `None` for one.
        axes: over which axes of the mesh the series lie.
    """

    series: Series
    num_series: int = eqx.field(static=True)
    batch_size: int = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)
    axes: tuple[str, ...] = eqx.field(static=True)

    def draw(self, key: PRNGKey, step: Int[Array, ""]) -> Batch:
        """One series of each of `batch_size` equal parts of the data."""
        index = minibatch(key, step, self.num_series, self.batch_size)
        if self.mesh is None:
            return self._batch(take(self.series, index), self.batch_size)
        shares = num_devices(self.mesh, self.axes)
        filled = self.series.ys.shape[0] != self.num_series
        if filled or self.num_series % shares or self.batch_size % shares:
            rows = NamedSharding(self.mesh, P(self.axes))
            drawn = take(self.series, fill_up(index, shares))
            return self._batch(lax.with_sharding_constraint(drawn, rows), self.batch_size)
        # Parts of the data and shares of devices end at the same series: none has to be sent.
        share, spec = self.num_series // shares, P(self.axes)

        def own(series: Series, index: Array) -> Series:
            return take(series, index - share * lax.axis_index(self.axes))

        own = jax.shard_map(own, mesh=self.mesh, in_specs=(spec, spec), out_specs=spec)
        return self._batch(own(self.series, index), self.batch_size)

    def all(self) -> Batch:
        """All series."""
        return self._batch(self.series, self.num_series)

    def _batch(self, series: Series, count: int) -> Batch:
        return Batch(series, count, self.mesh, self.axes)


def in_memory(
    batch: Series,
    batch_size: int,
    mesh: Mesh | None,
    axes: tuple[str, ...],
    count: int | None = None,
) -> InMemory:
    """The series of a batch as a source, laid over axes of a mesh.

    Args:
        batch: the series.
        batch_size: how many a step sees.
        mesh: the devices; `None` for one.
        axes: over which axes of the mesh the series lie.
        count: how many of them count, if the rest fills up; all by default.
    """
    count = batch.ys.shape[0] if count is None else count
    laid = spread(batch, mesh, axes).series
    return InMemory(laid, count, min(batch_size, count), mesh, axes)


def spread(batch: Series, mesh: Mesh | None, axes: tuple[str, ...]) -> Batch:
    """The series of a batch, filled up and laid over axes of a mesh."""
    count = batch.ys.shape[0]
    if mesh is None:
        return Batch(batch, count)
    laid = lay(fill_up(batch, num_devices(mesh, axes)), mesh, P(axes))
    return Batch(laid, count, mesh, axes)
