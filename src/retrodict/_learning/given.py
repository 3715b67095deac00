"""The series that a fit is given: all in memory, or in a store that is read as it goes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from retrodict._learning.batch import num_series, take
from retrodict._learning.resume import digests
from retrodict._learning.shared import counted_for, refuse_beside
from retrodict._learning.source import AbstractSource, Batch, in_memory
from retrodict._learning.stored import AbstractSeriesStore, Order, Stream, some_series
from retrodict._model import StateSpaceModel, prepare_data
from retrodict._series import Series
from retrodict._types import PRNGKey
from retrodict.distributed import is_spread, lay, to_hosts

NUM_PREPARED = 4096
"""How many series tell a family the units of the data."""


MOST_ROWS = 2**20
"""How many rows of a store do so at most."""


class Supply(NamedTuple):
    """What the steps of a training draw from.

    Attributes:
        source: the same for all steps, or `None`.
        feed: `feed(first, count, then)`, the source of some steps, or `None`; `then` is the first
            step of the next ones.
        steps_at_once: how many steps that is at most; `None` for a chunk.
        close: to be called when no more is needed.
    """

    source: AbstractSource | None
    feed: Callable[[int, int, int | None], AbstractSource] | None
    steps_at_once: int | None
    close: Callable[[], None]


class Wanted(NamedTuple):
    """What steps are to see.

    Attributes:
        key: the key of the training.
        batch_size: how many series a step sees; all of them if there are fewer.
        mesh: the devices; `None` for one.
        axes: over which axes of the mesh the series lie.
        chunk_size: steps between two grades.
    """

    key: PRNGKey
    batch_size: int
    mesh: Mesh | None
    axes: tuple[str, ...]
    chunk_size: int


class AbstractGiven(ABC):
    """The series of a fit, checked against its model.

    Attributes:
        num_times: how many rows each has, padding included.
        num_rows: how many rows exist in all.
    """

    num_times: int
    num_rows: float

    @abstractmethod
    def across(self) -> Series:
        """At most `NUM_PREPARED` of the series, across all of them, in every process."""

    @abstractmethod
    def first(self, count: int) -> Series:
        """At most so many series, always the same ones, in every process."""

    @abstractmethod
    def digest(self) -> bytes:
        """What tells these data from others."""

    @abstractmethod
    def supply(self, wanted: Wanted) -> Supply:
        """What steps draw from."""


class Whole(AbstractGiven):
    """All series at once.

    Args:
        batch: the series; in equal shares over the mesh if several processes hold them.
        count: how many of them count; the rest fills up.
        mesh: the devices; `None` for one.
    """

    def __init__(self, batch: Series, count: int, mesh: Mesh | None) -> None:
        self._batch = _in_equal_shares(batch, mesh) if is_spread(batch) else batch
        self._count = count
        self.num_times = batch.ys.shape[1]
        self.num_rows = float(Batch(self._batch, count).num_rows())

    def across(self) -> Series:
        """Some thousands of series."""
        count, batch = self._count, self._batch
        if count > NUM_PREPARED:
            batch = take(batch, np.arange(NUM_PREPARED) * count // NUM_PREPARED)
        return take(to_hosts(batch), slice(0, count))

    def first(self, count: int) -> Series:
        """The first series."""
        first = take(self._batch, slice(0, min(count, self._count)))
        return to_hosts(first) if is_spread(first) else first

    def digest(self) -> bytes:
        """The hashes of all series."""
        return digests(self._batch, self._count)

    def supply(self, wanted: Wanted) -> Supply:
        """One source for all steps."""
        source = in_memory(self._batch, wanted.batch_size, wanted.mesh, wanted.axes, self._count)
        return Supply(source, None, None, lambda: None)


class Stored(AbstractGiven):
    """Series in a store, of which a few blocks are in memory at a time.

    Args:
        store: where they are.
        model: the unwrapped model that they must fit.
    """

    def __init__(self, store: AbstractSeriesStore, model: StateSpaceModel) -> None:
        count = min(NUM_PREPARED, max(16, MOST_ROWS // store.num_times))
        self._store, self._some = store, some_series(store, count)
        self.num_times, self.num_rows = store.num_times, float(store.num_rows)
        first = take(self._some, 0)
        prepare_data(model, first.ys, inputs=first.inputs)

    def across(self) -> Series:
        """Series of a few blocks."""
        return self._some

    def first(self, count: int) -> Series:
        """Some of those."""
        known = num_series(self._some)
        return take(self._some, np.arange(min(count, known)) * known // min(count, known))

    def digest(self) -> bytes:
        """The hash of the store, and its blocks, on which the order depends."""
        return f"{self._store.digest()} {list(self._store.block_sizes)}".encode()

    def supply(self, wanted: Wanted) -> Supply:
        """Sources of some steps each, read while others are trained on."""
        size = min(wanted.batch_size, self._store.num_series)
        order = Order(self._store, wanted.key, size)
        stream = Stream(self._store, order, wanted.mesh, wanted.axes)
        return Supply(None, stream, stream.steps_at_once(wanted.chunk_size), stream.close)


def given_for(
    model: StateSpaceModel, ys: Any, *, mask: Any, inputs: Any, length: Any, mesh: Mesh | None
) -> AbstractGiven:
    """What a fit was given, checked against an unwrapped model."""
    if not isinstance(ys, AbstractSeriesStore):
        options = {"mask": mask, "inputs": inputs, "length": length}
        return Whole(*counted_for(model, ys, **options, mesh=mesh, owner="fit"), mesh)
    refuse_beside("fit", "the store of the series", mask=mask, inputs=inputs, length=length)
    return Stored(ys, model)


def _in_equal_shares(batch: Series, mesh: Mesh | None) -> Series:
    """Series of several processes as they lie over a mesh, refused if they cannot."""
    count = batch.ys.shape[0]
    if mesh is None or count % mesh.size:
        raise ValueError(
            f"The {count} series lie on several processes, and must do so in equal shares: give a"
            " mesh over which they can be laid, and a multiple of its number of devices."
        )
    return lay(batch, mesh, P(mesh.axis_names))
