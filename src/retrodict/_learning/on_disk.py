"""Datasets on disk: series in blocks, of which a few are in memory at a time.

The series are divided into lanes, equal parts as in `draw_indices`, and each minibatch takes
equally many series from every lane. A lane visits its blocks, and the series of a block, in another
order in every epoch. A few blocks are therefore in memory at a time, each series occurs once per
epoch, and a process reads only the lanes that its devices train on. Minibatches of the next steps
are read by a thread while the present ones are trained on.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from retrodict._arrays import PRNGKey
from retrodict._learning.dataset import (
    AbstractBatches,
    AbstractDataset,
    AbstractLoader,
    Minibatch,
    spaced_indices,
)
from retrodict._model import AbstractModel, Series
from retrodict.distributed import num_devices, shard_over

Arrays = dict[str, np.ndarray | None]
"""`ys`, `mask`, `inputs` and `length` of some series, as arguments of `Series`."""

MAX_LANES = 8
"""The largest number of blocks that are in memory at a time."""

MAX_LOAD_BYTES = 2**26
"""The largest size of the minibatches of one call of the training program."""

NUM_SAMPLED = 4096
"""The largest number of series that `StoredDataset` keeps in memory."""

NUM_SAMPLED_ROWS = 2**20
"""The largest number of rows that `StoredDataset` keeps in memory, for 16 series or more."""


class AbstractSeriesStore(ABC):
    """Series in blocks that are read one at a time, an argument of `fit`.

    Example:
        Series that are drawn when they are needed, an argument of `fit`:

        >>> import numpy as np, retrodict as rd
        >>> class Drawn(rd.data.AbstractSeriesStore):
        ...     num_times, num_rows, block_sizes = 20, 20 * 300, [100, 100, 100]
        ...     def load(self, block):
        ...         ys = np.random.default_rng(block).normal(size=(100, 20, 1))
        ...         return {"ys": ys, "mask": None, "inputs": None, "length": None}
        ...     def digest(self):
        ...         return "standard normal, version 1"
        >>> Drawn().num_series, Drawn().load(2)["ys"].shape
        (300, (100, 20, 1))

    Attributes:
        num_times: the number of rows to which every series is padded.
        num_rows: the number of existing rows of all series.
        block_sizes: the number of series in each block.
    """

    num_times: int
    num_rows: int
    block_sizes: Sequence[int]

    @property
    def num_series(self) -> int:
        """The number of series."""
        return sum(self.block_sizes)

    @abstractmethod
    def load(self, block: int) -> "Arrays":
        """Return `ys`, `mask`, `inputs` and `length` of the series of a block.

        All blocks have the same of these arrays, and `num_times` rows. `ys` is finite, and zero
        where `mask` is false. `mask` is `None` if no entry is missing in any block, and `length` if
        no series is padded.
        """

    @abstractmethod
    def digest(self) -> str:
        """Return a hash of the stored data, which is compared when a fit resumes."""


class StoredDataset(AbstractDataset):
    """Series in a store.

    Args:
        store: the store.
        model: the unwrapped model that the series must fit.
        mesh: the devices; `None` for one.
    """

    def __init__(self, store: AbstractSeriesStore, model: AbstractModel, mesh: Mesh | None) -> None:
        most = min(NUM_SAMPLED, max(16, NUM_SAMPLED_ROWS // store.num_times))
        self._store, self._mesh = store, mesh
        self._sample = sample_store(store, most)
        self.num_times, self.num_rows = store.num_times, float(store.num_rows)
        first = self._sample.at(0)
        model.series(first.ys, inputs=first.inputs)

    def spaced(self, count: int) -> Series:
        """Return at most `count` of the series that are kept in memory."""
        return self._sample.at(spaced_indices(self._sample.num_series, count))

    def first(self, count: int) -> Series:
        """Return the same as `spaced`."""
        return self.spaced(count)

    def fingerprint(self) -> bytes:
        """Return the hash of the store and its blocks, on which the order depends."""
        return f"{self._store.digest()} {list(self._store.block_sizes)}".encode()

    def loader(
        self, key: PRNGKey, batch_size: int, chunk_size: int, axes: tuple[str, ...]
    ) -> "StoredLoader":
        """Return a loader that reads ahead."""
        return StoredLoader(self._store, key, batch_size, chunk_size, self._mesh, axes)


def sample_store(store: AbstractSeriesStore, count: int) -> Series:
    """Return at most `count` series from a few blocks of a store."""
    blocks = np.unique(np.linspace(0, len(store.block_sizes) - 1, MAX_LANES).astype(int))
    per_block = -(-count // len(blocks))
    parts = []
    for block in blocks.tolist():
        size = store.block_sizes[block]
        index = np.unique(np.linspace(0, size - 1, min(per_block, size)).astype(int))
        parts.append(jax.tree.map(lambda leaf, index=index: leaf[index], store.load(block)))
    arrays = jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)[:count]), *parts)
    return Series(**arrays)


class StoredBatches(AbstractBatches):
    """The minibatches of some steps.

    Attributes:
        series: the series, with leading axes `step` and `batch`.
        first: the first of the steps.
        batch_size: the number of series of a minibatch that count.
        mesh: the devices; `None` for one.
        axes: the axes of the mesh over which the series are sharded.
    """

    series: Series
    first: Int[Array, ""]
    batch_size: int = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)
    axes: tuple[str, ...] = eqx.field(static=True)

    def minibatch(self, key: PRNGKey, step: Int[Array, ""]) -> Minibatch:
        """Return the minibatch that was read for this step."""
        series = jax.tree.map(lambda leaf: leaf[step - self.first], self.series)
        return Minibatch(series, self.batch_size, self.mesh, self.axes)


class EpochOrder:
    """The order in which the lanes of a store are read.

    Args:
        block_sizes: the number of series in each block.
        key: the key of the fit.
        batch_size: the number of series per step.

    Attributes:
        starts: the index of the first series of each block, and the number of series.
        lanes: the number of lanes.
        per_lane: the number of series that a minibatch takes from each.
    """

    def __init__(self, block_sizes: Sequence[int], key: PRNGKey, batch_size: int) -> None:
        self._seed = np.asarray(jax.random.key_data(key)).ravel().tolist()
        self.starts = np.concatenate([[0], np.cumsum(block_sizes)])
        most = min(MAX_LANES, len(block_sizes), batch_size)
        self.lanes = max(lanes for lanes in range(1, most + 1) if batch_size % lanes == 0)
        self.per_lane = batch_size // self.lanes
        self._epoch = functools.lru_cache(2 * self.lanes)(self._shuffle)

    def series(self, lane: int, begin: int, end: int) -> Int[np.ndarray, "series"]:
        """Return the series at positions begin..end-1 of a lane, counted over all epochs."""
        size = len(self._epoch(lane, 0))
        first = begin // size
        epochs = [self._epoch(lane, epoch) for epoch in range(first, -(-end // size))]
        return np.concatenate(epochs)[begin - first * size : end - first * size]

    def _shuffle(self, lane: int, epoch: int) -> Int[np.ndarray, "series"]:
        """Return one pass through a lane: blocks in random order, and the series within each."""
        count = int(self.starts[-1])
        first, last = lane * count // self.lanes, (lane + 1) * count // self.lanes
        edges = np.unique(np.clip(self.starts, first, last))
        rng = np.random.default_rng([*self._seed, lane, epoch])
        order = rng.permutation(len(edges) - 1)
        return np.concatenate([rng.permutation(np.arange(*edges[i : i + 2])) for i in order])


class StoredLoader(AbstractLoader):
    """A loader of minibatches from a store, which reads those of the next steps ahead.

    Args:
        store: the store.
        key: the key of the fit.
        batch_size: the number of series per step, at most.
        chunk_size: the number of steps between two evaluations.
        mesh: the devices; `None` for one.
        axes: the axes of the mesh over which minibatches are sharded.

    Attributes:
        order: the order in which series are read.
    """

    def __init__(
        self,
        store: AbstractSeriesStore,
        key: PRNGKey,
        batch_size: int,
        chunk_size: int,
        mesh: Mesh | None = None,
        axes: tuple[str, ...] = (),
    ) -> None:
        size = min(batch_size, store.num_series)
        self.order = EpochOrder(store.block_sizes, key, size)
        self._store, self._size, self._mesh, self._axes = store, size, mesh, axes
        self._shapes = jax.tree.map(lambda a: jax.eval_shape(jnp.asarray, a[0]), store.load(0))
        self._blocks: dict[int, tuple[int, Arrays]] = {}
        shards = 1 if mesh is None else num_devices(mesh, axes)
        self._padded = -(-size // shards) * shards
        one_device = jnp.zeros(()).sharding
        self._sharding = one_device if mesh is None else NamedSharding(mesh, P(None, axes))
        places = self._sharding.addressable_devices_indices_map((1, self._padded))
        self._shards = {self._shard(index) for index in places.values() if index is not None}
        self._worker = ThreadPoolExecutor(1, "retrodict-batches")
        self._ahead: tuple[tuple[int, int], Future[dict[tuple[int, int], Arrays]]] | None = None
        series_bytes = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(self._shapes))
        parts = -(-chunk_size * size * series_bytes // MAX_LOAD_BYTES)
        self.steps_per_load = -(-chunk_size // min(parts, chunk_size))

    def load(self, first: int, count: int, then: int | None) -> StoredBatches:
        """Return the batches of some steps, and begin to read those of the next call."""
        if self._ahead is not None and self._ahead[0] == (first, count):
            arrays = self._ahead[1].result()
        else:
            arrays = self._worker.submit(self._read, first, count).result()
        self._ahead = None
        if then is not None:
            self._ahead = ((then, count), self._worker.submit(self._read, then, count))
        start = jnp.asarray(first)
        start = start if self._mesh is None else shard_over(start, self._mesh, P())

        def over_devices(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
            def shard(index: Any) -> Any:
                return arrays[self._shard(index)][name]

            size = (count, self._padded, *shape.shape)
            return jax.make_array_from_callback(size, self._sharding, shard)

        series: Any = {
            name: None if shape is None else over_devices(name, shape)
            for name, shape in self._shapes.items()
        }
        return StoredBatches(Series(**series), start, self._size, self._mesh, self._axes)

    def close(self) -> None:
        """Stop reading."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _read(self, first: int, count: int) -> dict[tuple[int, int], Arrays]:
        """Read the shards of some steps' minibatches that this process trains on.

        This runs in another thread, where settings of JAX may differ: it computes with NumPy only.
        """
        return {shard: self._read_shard(first, count, *shard) for shard in self._shards}

    def _shard(self, index: tuple[slice, ...]) -> tuple[int, int]:
        """Return the first position of a shard in a minibatch, and the one after its last."""
        return index[1].start or 0, self._padded if index[1].stop is None else index[1].stop

    def _read_shard(self, first: int, count: int, begin: int, end: int) -> Arrays:
        """Read positions begin..end-1 of some minibatches; padding repeats the last series."""
        size, each = self._size, self.order.per_lane
        low, high = min(begin, size - 1), min(end, size)
        arrays = jax.tree.map(
            lambda shape: np.empty((count, high - low, *shape.shape), shape.dtype), self._shapes
        )
        base = first * each
        for lane in range(low // each, -(-high // each)):
            order = self.order.series(lane, base, base + count * each)
            turn = np.arange(len(order))
            step, place = turn // each, lane * each + turn % each - low
            block = np.searchsorted(self.order.starts, order, side="right") - 1
            for run in np.split(turn, np.flatnonzero(np.diff(block)) + 1):
                which = block[run[0]]
                run = run[(place[run] >= 0) & (place[run] < high - low)]
                target, index = (step[run], place[run]), order[run] - self.order.starts[which]

                def copy(array: Any, source: Any, target=target, index=index) -> None:
                    array[target] = source[index]

                jax.tree.map(copy, arrays, self._block(lane, int(which)))
        if (low, high) == (begin, end):
            return arrays
        index = np.minimum(np.arange(begin, end), size - 1) - low
        return jax.tree.map(lambda array: array[:, index], arrays)

    def _block(self, lane: int, block: int) -> Arrays:
        """Return a block of a lane, which keeps one block in memory."""
        if lane not in self._blocks or self._blocks[lane][0] != block:
            self._blocks.pop(lane, None)
            self._blocks[lane] = (block, self._store.load(block))
        return self._blocks[lane][1]
