"""Tables larger than memory: series that stay in their files, and are read block by block."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from retrodict._errors import DataError, listed
from retrodict._learning import AbstractSeriesStore, Arrays, ProgressLine
from retrodict.data._chunked import NetcdfSeries, ParquetRows
from retrodict.data._reader import read
from retrodict.data._source import Source
from retrodict.data._summary import Summary, add_up
from retrodict.data._table import Table
from retrodict.distributed import all_gather_object, by_all

T = TypeVar("T")

BLOCK_ROWS = 50_000
"""How many rows a block has at least, if there are so many."""


class StoredSeries(AbstractSeriesStore):
    """Series in files, as `open_series` found them.

    Attributes:
        names: the columns that are observed.
        input_names: the inputs.
        num_times: the rows of the longest series.
        num_rows: the rows of all series, those inserted in gaps included.
        num_missing: how many entries of them were not observed.
        block_sizes: how many series each block has.
        layout: the arguments by which `read` reads any of it.
    """

    def __init__(
        self,
        places: Sequence[tuple["_File", int]],
        layout: dict[str, Any],
        summaries: Sequence[Summary],
        inputs: Sequence[str],
    ) -> None:
        self._places = list(places)
        whole = add_up(summaries)
        prints = " ".join(summary.fingerprint for summary in summaries)
        self._digest = hashlib.sha256(prints.encode()).hexdigest()
        self._equal = whole.shortest == whole.longest
        self._sources = list(dict.fromkeys(file.name for file, _ in places))
        self.layout, self.names, self.input_names = layout, tuple(layout["columns"]), tuple(inputs)
        self.num_times, self.num_rows = whole.longest, whole.num_rows
        self.num_missing = whole.num_rows * len(self.names) - sum(whole.seen)
        self.block_sizes = tuple(summary.num_series for summary in summaries)

    def __repr__(self) -> str:
        return (
            f"StoredSeries({self.num_series} series, up to {self.num_times} rows,"
            f" {len(self.names)} columns: {listed(self.names)}; {len(self.block_sizes)} blocks)"
        )

    def table(self, block: int) -> Table:
        """The series of a block, padded to the longest of all."""
        file, own = self._places[block]
        source = file.read(own, self.layout, known=True)
        return read(source, **{**self.layout, "pad_to": self.num_times})

    def tables(self) -> Iterator[Table]:
        """All series, a block at a time: to smooth or summarise more than fits into memory."""
        return (self.table(block) for block in range(len(self.block_sizes)))

    def load(self, block: int) -> Arrays:
        """The arrays of a block, as `fit` draws from them."""
        table = self.table(block)
        return {
            "ys": np.where(table.mask, table.ys, 0.0),
            "mask": table.mask if self.num_missing or not self._equal else None,
            "inputs": table.inputs,
            "length": None if self._equal else table.length,
        }

    def digest(self) -> str:
        """The SHA-256 of what all blocks hold, in their order."""
        return self._digest

    def described(self) -> list[str]:
        """What was understood of the files, a line each."""
        gone = self.num_missing / (self.num_rows * len(self.names))
        return [
            f"source: {listed(self._sources, 3)}",
            f"rows: {self.num_rows}, in {self.num_series} series of up to {self.num_times},"
            f" in {len(self.block_sizes)} blocks",
            f"time: {self.layout['time'] or 'the row number'}, step {self.layout['freq']}",
            f"columns: {listed(self.names)}; missing: {100 * gone:.1f} %",
            *([f"inputs: {listed(self.input_names)}"] if self.input_names else []),
        ]


def open_series(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    series: str | Sequence[str],
    time: str | None = None,
    columns: str | Sequence[str] | None = None,
    inputs: str | Sequence[str] | None = None,
    freq: str | int | float | None = None,
    step_input: bool = False,
    step_unit: str | int | float | None = None,
    time_format: str | None = None,
    together: bool = False,
    progress: bool = True,
) -> StoredSeries:
    """Opens series that are too large for memory: `fit` draws its batches from where they lie.

    Everything is read once, block by block, and checked as `read` checks it; no more than a block
    is in memory. The first block says which columns there are and what their step is, unless it is
    said here. In a Parquet file the rows of a series must follow one another. A block is a row
    group or several, at least 50,000 rows, and training holds up to eight: write row groups of not
    much more.

    Example:
        `rd.fit(key, family, model, rd.data.open_series("big.parquet", series="id"))`.

    Args:
        source: the path of a `.parquet` or `.nc` file, or of several that go together.
        series: the column or columns, or the dimension of a NetCDF file, that tell series apart.
        time: as in `read`, like the rest.
        columns: what is observed.
        inputs: columns of inputs.
        freq: the step of the times.
        step_input: whether to add the time since the row before as the first input.
        step_unit: what counts as 1 in that input.
        time_format: how dates are written.
        together: whether all processes of a job open the same files at this point, so that each
            has to look at its share of the blocks alone.
        progress: whether to show a progress line.

    Returns:
        The series, for `fit`, or to go through by `tables()`.

    Raises:
        DataError: if something cannot be read or does not make sense, in one line.
        ValueError: if so in another process, where they open it together.
        ProcessLostError: if another process has ended, where they open it together.
    """
    apart = _names(series)
    if not apart:
        raise DataError("open_series: series names nothing; name what tells series apart.")
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not paths:
        raise DataError("open_series: there is no file; name one.")
    by_each = by_all if together else _alone
    files = by_each(lambda: [_open(Path(path), os.fspath(path), apart) for path in paths])
    layout: dict[str, Any] = {
        "time": time,
        "series": apart,
        "columns": _names(columns),
        "inputs": _names(inputs),
        "freq": freq,
        "step_input": step_input,
        "step_unit": step_unit,
        "time_format": time_format,
    }
    every = [(file, block) for file in files for block in range(file.num_blocks)]
    first, table = by_each(lambda: _first_table(every, layout))
    looks = by_each(lambda: _look(every, first, table, _own(every, together), progress))
    if together:
        looks = _from_all(looks)
    places = [every[number] for number in sorted(looks)]
    found = [looks[number] for number in sorted(looks)]
    if (twice := _twice(found)) is not None:
        file, block = places[twice]
        raise DataError(
            f"{file.name}: a series of block {block + 1} of {file.num_blocks} stands in another"
            f" place too; sort the rows by {listed(apart)}, so that each series is in one place."
        )
    summaries = [look.summary for look in found]
    if not any(add_up(summaries).seen):
        raise DataError(f"{listed(f.name for f in files)}: every value is missing.")
    return StoredSeries(places, table.layout, summaries, table.input_names)


def _alone(compute: Callable[[], T]) -> T:
    return compute()


class _Look(NamedTuple):
    """What is seen of a block at first.

    Attributes:
        summary: what is to be known of its series.
        identifiers: hashes of their names, the same in every process.
    """

    summary: Summary
    identifiers: list[int]


def _first_table(every: Sequence[tuple["_File", int]], layout: dict[str, Any]) -> tuple[int, Table]:
    """The number of the first block with rows, and the block, which says how others are read."""
    for number, (file, block) in enumerate(every):
        part = file.read(block, layout, known=False)
        if len(part.frame):  # series of a rectangle of which nothing was observed have no rows
            return number, read(part, **layout)
    raise DataError(f"{listed(dict.fromkeys(f.name for f, _ in every))}: every value is missing.")


def _own(every: Sequence[Any], together: bool) -> range:
    """The numbers of the blocks that this process looks at."""
    if not together:
        return range(len(every))
    who, count = jax.process_index(), jax.process_count()
    return range(len(every) * who // count, len(every) * (who + 1) // count)


def _look(
    every: Sequence[tuple["_File", int]], first: int, table: Table, own: range, progress: bool
) -> dict[int, _Look]:
    """What is seen of the blocks with rows among some, by their numbers."""
    line = ProgressLine("{:.0f} rows were read", len(own)) if progress else None
    looks: dict[int, _Look] = {}
    rows = 0
    for done, number in enumerate(own):
        file, block = every[number]
        part = None if number == first else file.read(block, table.layout, known=True)
        if part is None or len(part.frame):
            found = table if part is None else read(part, **table.layout)
            hashes = [hashlib.blake2b(str(i).encode(), digest_size=8) for i in found.series or ()]
            identifiers = [int.from_bytes(each.digest(), "big") for each in hashes]
            looks[number] = _Look(found.summary, identifiers)
            rows += found.summary.num_rows
        if line is not None:
            line(done + 1, -float(rows))
    return looks


def _from_all(looks: dict[int, _Look]) -> dict[int, _Look]:
    """The looks of all processes."""
    own = {number: (look.summary.to_dict(), look.identifiers) for number, look in looks.items()}
    return {
        int(number): _Look(Summary.from_dict(summary), identifiers)
        for said in all_gather_object(own)
        for number, (summary, identifiers) in said.items()
    }


def _twice(looks: Sequence[_Look]) -> int | None:
    """The last block with a series that stands in another block too."""
    every = np.concatenate([np.array(look.identifiers, np.uint64) for look in looks])
    values, counts = np.unique(every, return_counts=True)
    if counts.max() == 1:
        return None
    at = int(np.flatnonzero(every == values[np.argmax(counts)])[-1])
    sizes = [look.summary.num_series for look in looks]
    return int(np.searchsorted(np.cumsum(sizes), at, side="right"))


def _names(given: str | Sequence[str] | None) -> list[str] | None:
    if given is None:
        return None
    return [given] if isinstance(given, str) else [str(name) for name in given]


class _File(ABC):
    """A file of several blocks."""

    name: str
    num_blocks: int

    @abstractmethod
    def read(self, block: int, layout: dict[str, Any], *, known: bool) -> Source:
        """A block.

        Args:
            block: which.
            layout: the arguments of `read`.
            known: whether they name all that is to be read; else there may be more, and the time
                is to be looked for.
        """


def _open(path: Path, name: str, apart: list[str]) -> _File:
    if not path.exists():
        raise DataError(f"{name}: there is no such file; check the path.")
    if path.is_dir():
        raise DataError(f"{name}: it is a folder; name the files in it.")
    kinds = {".parquet": _Parquet, ".nc": _Netcdf}
    suffix = path.suffix.lower()
    if suffix not in kinds:
        raise DataError(
            f"{name}: the suffix {suffix!r} is not one of {', '.join(kinds)}; write it as such a"
            " file, or use read if it fits into memory."
        )
    return kinds[suffix](path, name, apart)


class _Parquet(_File):
    """Rows of one series after another; a block begins with the first series of a row group."""

    def __init__(self, path: Path, name: str, apart: list[str]) -> None:
        self.name, self._rows = name, ParquetRows(path, name, apart)
        self._cuts = self._whole_series()
        self.num_blocks = len(self._cuts) - 1

    def _whole_series(self) -> list[int]:
        """Rows at which blocks begin, each with the first row of a series, and the end."""
        cuts, last = [0], None
        for begin, cells in self._rows.identifiers():
            changes = (cells != cells.shift()).any(axis=1).to_numpy(copy=True)
            changes[0] = last is None or tuple(cells.iloc[0]) != last
            last = tuple(cells.iloc[-1])
            starts = begin + np.flatnonzero(changes)
            if starts.size and starts[0] - cuts[-1] >= BLOCK_ROWS:
                cuts.append(int(starts[0]))
        return [*cuts, self._rows.count]

    def read(self, block: int, layout: dict[str, Any], *, known: bool) -> Source:
        """The rows of a block, from the row groups that hold them."""
        return self._rows.read(self._cuts[block], self._cuts[block + 1], layout, known=known)


class _Netcdf(_File):
    """Variables along a dimension of series."""

    def __init__(self, path: Path, name: str, apart: list[str]) -> None:
        self.name, self._series = name, NetcdfSeries(path, name, apart)
        count = self._series.count
        each = max(1, BLOCK_ROWS // self._series.rows)
        self._cuts = [*range(0, count, each), count]
        self.num_blocks = len(self._cuts) - 1

    def read(self, block: int, layout: dict[str, Any], *, known: bool) -> Source:
        """The series of a block."""
        return self._series.read(np.arange(self._cuts[block], self._cuts[block + 1]), layout)
