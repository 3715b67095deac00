"""Datasets in memory: arrays on one device, or sharded over the devices of a mesh.

The devices may belong to several processes, each of which holds its share of the series.
"""

import hashlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from retrodict._learning.dataset import (
    AbstractBatches,
    AbstractDataset,
    AbstractLoader,
    Minibatch,
    num_series,
    take,
)
from retrodict._series import Series
from retrodict._types import PRNGKey
from retrodict.distributed import (
    is_multi_process,
    map_shards,
    num_devices,
    pad_to_multiple,
    shard_over,
    to_hosts,
)


class ArrayDataset(AbstractDataset):
    """Series in arrays, in the memory of this process or sharded over those of several.

    Args:
        series: the series, with a leading axis `batch`.
        count: the number of series that count; the rest is padding.
        mesh: the devices; `None` for one.
    """

    def __init__(self, series: Series, count: int, mesh: Mesh | None) -> None:
        size, self._is_shared = num_series(series), is_multi_process(series)
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
        self.num_rows = float(Minibatch(series, count).num_rows())

    def spaced(self, count: int) -> Series:
        """Return at most `count` series at equal distances."""
        return self._at(spaced_indices(self._count, count))

    def first(self, count: int) -> Series:
        """Return the first series."""
        return self._at(slice(0, min(count, self._count)))

    def _at(self, index: Any) -> Series:
        """Return some of the series, in the memory of every process."""
        chosen = take(self._series, index)
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
    ) -> "InMemoryLoader":
        """Return a loader that gives every step the same arrays."""
        return InMemoryLoader(self._series, self._count, batch_size, self._mesh, axes)


class InMemoryBatches(AbstractBatches):
    """All series, from which each step draws its minibatch.

    Attributes:
        everything: all series, on one device or in equal shares on those of a mesh.
        batch_size: the number of series per step.
    """

    everything: Minibatch
    batch_size: int = eqx.field(static=True)

    def minibatch(self, key: PRNGKey, step: Int[Array, ""]) -> Minibatch:
        """Draw one series from each of `batch_size` equal parts of the data."""
        series, count = self.everything.series, self.everything.count
        mesh, axes = self.everything.mesh, self.everything.axes
        index = draw_indices(key, step, count, self.batch_size)
        if mesh is None:
            return Minibatch(take(series, index), self.batch_size)
        shards = num_devices(mesh, axes)
        if num_series(series) != count or count % shards or self.batch_size % shards:
            chosen = take(series, pad_to_multiple(index, shards))
            chosen = lax.with_sharding_constraint(chosen, NamedSharding(mesh, P(axes)))
            return Minibatch(chosen, self.batch_size, mesh, axes)

        # Parts of the data and shards end at the same series: nothing is sent between devices.
        def of_shard(series: Series, index: Array) -> Series:
            return take(series, index - count // shards * lax.axis_index(axes))

        spec = P(axes)
        chosen = jax.shard_map(of_shard, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        return Minibatch(chosen(series, index), self.batch_size, mesh, axes)


class InMemoryLoader(AbstractLoader):
    """A loader of series that are in memory.

    Args:
        series: the series.
        count: the number of series that count.
        batch_size: the number of series per step, at most.
        mesh: the devices; `None` for one.
        axes: the axes of the mesh over which the series are sharded.
    """

    def __init__(
        self, series: Series, count: int, batch_size: int, mesh: Mesh | None, axes: tuple[str, ...]
    ) -> None:
        everything = Minibatch.on_devices(series, mesh, axes, count)
        self.batches = InMemoryBatches(everything, min(batch_size, count))

    def load(self, first: int, count: int, then: int | None) -> InMemoryBatches:
        """Return all series."""
        return self.batches


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


def spaced_indices(count: int, most: int) -> Int[np.ndarray, "index"]:
    """Return at most `most` of the indices 0..count-1, at equal distances."""
    most = min(most, count)
    return np.arange(most) * count // most


def hash_series(series: Series) -> np.ndarray:
    """Return the SHA-256 of each series, one row per series."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(series)]
    rows = [b"".join(leaf[i].tobytes() for leaf in leaves) for i in range(len(leaves[0]))]
    return np.stack([np.frombuffer(hashlib.sha256(row).digest(), np.uint8) for row in rows])
