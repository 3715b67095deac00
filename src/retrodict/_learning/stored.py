"""Series that stay where they are stored: blocks of them in memory, and batches ahead of time.

Which series a step sees depends on the key and the step alone. The series are cut into lanes, equal
parts as `minibatch` has them, and each batch has equally many of every lane. A lane goes through
its blocks in another order in every epoch, and through the series of a block likewise, so that a
few blocks are in memory at a time, each series comes once an epoch, and a process reads the lanes
that its devices train on and no others.
"""

import bisect
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from retrodict._learning.source import AbstractSource, Batch
from retrodict._series import Series
from retrodict._types import PRNGKey
from retrodict.distributed import lay, num_devices

Arrays = dict[str, np.ndarray | None]
"""`ys`, `mask`, `inputs` and `length` of some series, as arguments of `Series`."""


MOST_LANES = 8
"""How many blocks of a file are read side by side."""


MOST_BYTES = 2**26
"""What the batches of one call of the training program may take."""


class AbstractSeriesStore(ABC):
    """Series in blocks that are read one at a time, for `fit` to draw from.

    Attributes:
        num_times: the rows that every series is padded to.
        num_rows: the rows that exist, in all series.
        block_sizes: how many series each block has.
    """

    num_times: int
    num_rows: int
    block_sizes: Sequence[int]

    @property
    def num_series(self) -> int:
        """How many series there are."""
        return sum(self.block_sizes)

    @abstractmethod
    def load(self, block: int) -> "Arrays":
        """The series of a block: `ys`, `mask`, `inputs` and `length` as `fit` takes them.

        All blocks have the same of them, and `num_times` rows. `ys` is finite, zero where `mask` is
        false; `mask` is `None` if nothing is missing anywhere, and `length` if nothing is padded.
        """

    @abstractmethod
    def digest(self) -> str:
        """A hash of what is stored, by which a checkpoint knows its data."""


def some_series(store: AbstractSeriesStore, count: int) -> Series:
    """At most so many series across a store, from a few of its blocks."""
    blocks = np.unique(np.linspace(0, len(store.block_sizes) - 1, MOST_LANES).astype(int))
    each = -(-count // len(blocks))
    parts = []
    for block in blocks.tolist():
        size = store.block_sizes[block]
        index = np.unique(np.linspace(0, size - 1, min(each, size)).astype(int))
        kept = store.load(block).items()
        parts.append({name: None if array is None else array[index] for name, array in kept})
    joined = {
        name: None if part is None else np.concatenate([each[name] for each in parts])[:count]
        for name, part in parts[0].items()
    }
    return jax.vmap(Series)(**jax.tree.map(jnp.asarray, joined))


class Order:
    """Which series the steps of a training see.

    Args:
        store: where they are.
        key: the key of the training.
        batch_size: how many a step sees.
    """

    def __init__(self, store: AbstractSeriesStore, key: PRNGKey, batch_size: int) -> None:
        self._seed = np.asarray(jax.random.key_data(key)).ravel().tolist()
        self._starts = np.concatenate([[0], np.cumsum(store.block_sizes)])
        most = min(MOST_LANES, len(store.block_sizes), batch_size)
        self.lanes = max(lanes for lanes in range(1, most + 1) if batch_size % lanes == 0)
        self.batch_size = batch_size
        self.of_each = batch_size // self.lanes
        self._dealt: OrderedDict[tuple[int, int], list[tuple[int, int, np.ndarray]]] = OrderedDict()

    def runs(self, lane: int, begin: int, end: int) -> list[tuple[int, int, np.ndarray]]:
        """The places begin..end-1 of a lane: their first one, a block, and series of it in turn."""
        first, last = self._part(lane)
        size, found = last - first, []
        for epoch in range(begin // size, -(-end // size)):
            for place, block, series in self._epoch(lane, epoch):
                start, stop = place + epoch * size, place + epoch * size + len(series)
                kept = slice(max(begin - start, 0), min(end, stop) - start)
                if kept.start < kept.stop:
                    found.append((start + kept.start, block, series[kept]))
        return found

    def _part(self, lane: int) -> tuple[int, int]:
        count = int(self._starts[-1])
        return lane * count // self.lanes, (lane + 1) * count // self.lanes

    def _epoch(self, lane: int, epoch: int) -> list[tuple[int, int, np.ndarray]]:
        """One pass through a lane: places from 0 on, blocks, and the order within each."""
        if (lane, epoch) not in self._dealt:
            first, last = self._part(lane)
            block = bisect.bisect_right(self._starts, first) - 1
            rng = np.random.default_rng([*self._seed, lane, epoch])
            pieces = []
            while self._starts[block] < last:
                begin, end = self._starts[block : block + 2]
                own = np.arange(max(begin, first), min(end, last)) - begin
                pieces.append((block, own))
                block += 1
            place, dealt = 0, []
            for which in rng.permutation(len(pieces)):
                block, own = pieces[which]
                dealt.append((place, block, rng.permutation(own)))
                place += len(own)
            self._dealt[lane, epoch] = dealt
            while len(self._dealt) > 2 * self.lanes:
                self._dealt.popitem(last=False)
        return self._dealt[lane, epoch]


class Streamed(AbstractSource):
    """The batches of some steps.

    Attributes:
        series: their series, with leading axes `step` and `batch`.
        first: the first of the steps.
        batch_size: how many series of a batch count.
        mesh: the devices; `None` for one.
        axes: over which axes of the mesh the series lie.
    """

    series: Series
    first: Int[Array, ""]
    batch_size: int = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)
    axes: tuple[str, ...] = eqx.field(static=True)

    def draw(self, key: PRNGKey, step: Int[Array, ""]) -> Batch:
        """The batch that was read for this step."""
        at = jax.tree.map(lambda leaf: leaf[step - self.first], self.series)
        return Batch(at, self.batch_size, self.mesh, self.axes)


class Stream:
    """Batches from a store, those of the coming steps read while the present ones are trained on.

    Args:
        store: where the series are.
        order: which of them each step sees.
        mesh: the devices; `None` for one.
        axes: over which axes of the mesh the series lie.
    """

    def __init__(
        self, store: AbstractSeriesStore, order: Order, mesh: Mesh | None, axes: tuple[str, ...]
    ) -> None:
        self._store, self._order, self._mesh, self._axes = store, order, mesh, axes
        self._shapes = {
            name: None if array is None else jax.eval_shape(jnp.asarray, array[0])
            for name, array in store.load(0).items()
        }
        self._held: dict[int, tuple[int, Arrays]] = {}
        self._sharding, self._filled, self._own = None, order.batch_size, {(0, order.batch_size)}
        if mesh is not None:
            shares = num_devices(mesh, axes)
            self._filled = -(-order.batch_size // shares) * shares
            self._sharding = NamedSharding(mesh, P(None, axes))
            places = self._sharding.addressable_devices_indices_map((1, self._filled))
            self._own = {self._share(index) for index in places.values() if index is not None}
        self._worker = ThreadPoolExecutor(1, "retrodict-batches")
        self._coming: tuple[tuple[int, int], Future[dict[tuple[int, int], Arrays]]] | None = None

    def steps_at_once(self, chunk_size: int) -> int:
        """How many steps' batches are read at a time: equal parts of a chunk, not too large."""
        shapes = [shape for shape in self._shapes.values() if shape is not None]
        bytes_of = sum(shape.size * shape.dtype.itemsize for shape in shapes)
        parts = -(-chunk_size * self._order.batch_size * bytes_of // MOST_BYTES)
        return -(-chunk_size // min(parts, chunk_size))

    def __call__(self, first: int, count: int, then: int | None) -> Streamed:
        """The batches of some steps; those that are needed next are read meanwhile.

        Args:
            first: the first step.
            count: how many there are.
            then: the first step of the next call; `None` if this is the last.
        """
        asked = (first, count)
        if self._coming is not None and self._coming[0] == asked:
            found = self._coming[1].result()
        else:
            found = self._worker.submit(self._read, *asked).result()
        self._coming = None
        if then is not None:
            after = (then, count)
            self._coming = (after, self._worker.submit(self._read, *after))
        return self._laid(first, count, found)

    def close(self) -> None:
        """Reads no more."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _read(self, first: int, count: int) -> dict[tuple[int, int], Arrays]:
        """The places of some steps' batches that devices of this process train on.

        Nothing of JAX is called here, in another thread: its settings may be those of one thread.
        """
        return {own: self._places(first, count, *own) for own in self._own}

    def _laid(self, first: int, count: int, made: dict[tuple[int, int], Arrays]) -> Streamed:
        size, mesh, sharding = self._order.batch_size, self._mesh, self._sharding
        if mesh is None or sharding is None:
            (found,) = made.values()
            arrays = {
                name: None if array is None else jnp.asarray(array) for name, array in found.items()
            }
            return Streamed(_series(arrays), jnp.asarray(first), size, None, ())

        def part(name: str) -> Callable[[Any], Any]:
            return lambda index: made[self._share(index)][name]

        arrays = {
            name: None
            if shape is None
            else jax.make_array_from_callback(
                (count, self._filled, *shape.shape), sharding, part(name)
            )
            for name, shape in self._shapes.items()
        }
        return Streamed(_series(arrays), lay(jnp.asarray(first), mesh, P()), size, mesh, self._axes)

    def _share(self, index: tuple[slice, ...]) -> tuple[int, int]:
        """The first place of a batch in a share, and the one after its last."""
        return index[1].start or 0, self._filled if index[1].stop is None else index[1].stop

    def _places(self, first: int, count: int, begin: int, end: int) -> Arrays:
        """Places begin..end-1 of some steps' batches; those beyond a batch repeat its last."""
        size, each = self._order.batch_size, self._order.of_each
        low, high = min(begin, size - 1), min(end, size)
        found = {
            name: None
            if shape is None
            else np.empty((count, high - low, *shape.shape), shape.dtype)
            for name, shape in self._shapes.items()
        }
        for lane in range(low // each, -(-high // each)):
            base = first * each
            for at, block, series in self._order.runs(lane, base, base + count * each):
                turn = np.arange(at - base, at - base + len(series))
                place = lane * each + turn % each
                own = (place >= low) & (place < high)
                loaded = self._block(lane, block)
                for name, array in found.items():
                    if array is not None:
                        kept = loaded[name][series[own]]  # pyright: ignore[reportOptionalSubscript]
                        array[turn[own] // each, place[own] - low] = kept
        if (low, high) == (begin, end):
            return found
        again = np.minimum(np.arange(begin, end), size - 1) - low
        return {name: None if array is None else array[:, again] for name, array in found.items()}

    def _block(self, lane: int, block: int) -> Arrays:
        """A block of a lane, which holds no other."""
        if lane not in self._held or self._held[lane][0] != block:
            self._held.pop(lane, None)
            self._held[lane] = (block, self._store.load(block))
        return self._held[lane][1]


def _series(arrays: dict[str, Any]) -> Series:
    """A series whose arrays have leading axes."""
    return jax.vmap(jax.vmap(Series))(**arrays)
