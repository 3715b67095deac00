"""Tables of several processes: each reads the series that lie on its devices, and no others."""

import dataclasses
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from retrodict._errors import DataError, optional
from retrodict._learning import SharedSeries
from retrodict.data._chunked import NetcdfSeries, ParquetRows, TextRows
from retrodict.data._files import SEPARATORS
from retrodict.data._identifiers import check_identified, ordered
from retrodict.data._reader import read
from retrodict.data._source import Source, frame_source
from retrodict.data._summary import Summary, add_up
from retrodict.data._table import MOST_LEADING_ROWS, Table
from retrodict.data._timestamps import kind_of_times
from retrodict.distributed import all_gather_object, by_all, process_slice


@dataclass(frozen=True, eq=False, repr=False)
class SharedTable:
    """A table of which each process holds its share, as `read_shared` finds it.

    Attributes:
        leading: the first series, the same in every process.
        own: the series of this process; `None` if the devices of others have all of them.
        share: their places among all series.
        summary: what is to be known of all series.
    """

    leading: Table
    own: Table | None
    share: slice
    summary: Summary

    def __repr__(self) -> str:
        count, own = self.summary.num_series, self.share.stop - self.share.start
        return f"SharedTable({count} series, up to {self.summary.longest} rows; {own} own)"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns that are observed."""
        return self.leading.names

    @property
    def input_names(self) -> tuple[str, ...]:
        """Of the inputs."""
        return self.leading.input_names

    @property
    def layout(self) -> dict[str, Any]:
        """What `read` is to be told so that another table is read in the same way."""
        return self.leading.layout

    @property
    def source(self) -> str:
        """The file as it was given."""
        return self.leading.source

    @property
    def num_series(self) -> int:
        """How many series there are in all processes."""
        return self.summary.num_series

    def leading_series(self) -> Table:
        """The first series, the same in every process."""
        return self.leading

    def described(self) -> list[str]:
        """What was understood of the table, a line each."""
        return self.leading.described(self.summary)

    def batch(self) -> dict[str, Any]:
        """All series as keywords of `fit` and `fit_evidence`: `ys` alone, which brings the rest."""
        return {"ys": self._series}

    @functools.cached_property
    def _series(self) -> SharedSeries:
        if self.own is not None:
            return SharedSeries(**self.own.padded(self.summary.longest).batch())
        shape, width = (0, self.summary.longest), len(self.input_names)
        return SharedSeries(
            np.zeros((*shape, len(self.names))),
            inputs=np.zeros((*shape, width)) if width else None,
            length=np.zeros(0, int),
        )


def read_shared(source: str | os.PathLike[str], **layout: Any) -> Table | SharedTable:
    """Reads a table of which each process of a job is to hold its share.

    All processes call it, with the same arguments. Each looks at the identifiers of all rows, reads
    the first series, as many as have 100,000 rows together, and then the series that lie on its
    devices. What `read` finds by itself, columns and the step of the times, is found in those first
    series: say it, if they differ from others. Of Parquet files the row groups that hold these
    series are read, so that rows sorted by series are read quickest; of NetCDF files these series,
    of which each must hold a value; text is gone through by each process, which keeps its rows.

    A table is read whole by each process if it has no more than 100,000 rows or a single series; if
    its times are irregular and make up an input whose unit was not said; if series of a NetCDF file
    are not told apart by one dimension; or if a Parquet file has an index that is no column.

    Args:
        source: the path of a `.csv`, `.tsv`, `.parquet` or `.nc` file that all processes see.
        **layout: what else `read` takes, but for `pad_to`.

    Returns:
        The whole table or, if processes share it, a `SharedTable`.

    Raises:
        DataError: if the table cannot be read or does not make sense.
        ValueError: if so in another process.
        ProcessLostError: if another process has ended.
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"read_shared expects the path of a file, got {type(source).__name__}; use read."
        )
    if jax.process_count() == 1:
        return read(source, **layout)
    names = ("series", "columns", "inputs")
    layout |= {name: [layout[name]] for name in names if isinstance(layout.get(name), str)}
    index = by_all(lambda: _index_of(Path(source), os.fspath(source), layout))
    sizes = all_gather_object(None if index is None else [index.count, int(index.rows.sum())])
    if any(size != sizes[0] for size in sizes):
        seen = ["none, or few rows" if size is None else f"{size[1]} rows" for size in sizes]
        raise DataError(
            f"{os.fspath(source)}: the processes see different files ({'; '.join(seen)}); it must"
            " lie where all of them see it."
        )
    if index is None:
        return by_all(lambda: read(source, **layout))
    leading = by_all(lambda: _leading(index, layout))
    in_own_unit = leading.step_unit is not None and leading.step is None
    if leading.num_series == index.count or (in_own_unit and not layout.get("step_unit")):
        return by_all(lambda: read(source, **layout))
    share = process_slice(index.count)
    own, kind = by_all(lambda: _own(index, share, leading.layout))
    kinds = [kind for kind in all_gather_object(kind) if kind is not None]
    if len(set(kinds)) > 1:
        raise DataError(
            f"{index.name}, column {leading.time_name!r}: the times of some series are {kinds[0]},"
            f" and those of others {next(k for k in kinds if k != kinds[0])}; write all in one way."
        )
    said = all_gather_object(None if own is None else own.summary.to_dict())
    summary = add_up([Summary.from_dict(part) for part in said if part is not None])
    summary = dataclasses.replace(
        summary, notes=tuple(dict.fromkeys(leading.notes + summary.notes))
    )
    for name, seen in zip(leading.names, summary.seen, strict=True):
        if not seen:
            raise DataError(
                f"{index.name}, column {name!r}: every value is missing; name the others with"
                " columns=..."
            )
    return SharedTable(leading, own, share, summary)


class _Index(ABC):
    """Which series a file has, in the order of `read`, and how to read some of them.

    Attributes:
        name: the file as it was given.
        count: how many series there are.
        rows: how many rows each has, at most.
    """

    name: str
    count: int
    rows: np.ndarray

    @abstractmethod
    def read(self, share: slice, layout: dict[str, Any], *, known: bool) -> Source:
        """Some series that follow one another.

        Args:
            share: their places.
            layout: the arguments of `read`.
            known: whether they name all that is to be read.
        """


def _index_of(path: Path, name: str, layout: dict[str, Any]) -> _Index | None:
    """The index of a file; `None` if it is to be read whole, or to be refused by `read`."""
    apart: list[str] = list(layout.get("series") or ())
    suffix = path.suffix.lower()
    if not apart or not path.is_file() or not path.stat().st_size:
        return None
    index: _Index
    if suffix == ".parquet" and ParquetRows.are_apart(path, name, apart):
        index = _ParquetIndex(path, name, apart)
    elif suffix in SEPARATORS:
        index = _TextIndex(path, name, SEPARATORS[suffix], apart)
    elif suffix == ".nc" and NetcdfSeries.is_along(path, name, apart):
        index = _NetcdfIndex(path, name, apart)
    else:
        return None
    return index if index.count > 1 and index.rows.sum() > MOST_LEADING_ROWS else None


def _leading(index: _Index, layout: dict[str, Any]) -> Table:
    """The first series, by which it is decided how all are read."""
    # One more than are wanted, so that it is seen where they end.
    count = 1 + int(np.searchsorted(np.cumsum(index.rows), MOST_LEADING_ROWS, side="right"))
    while True:
        count = min(count, index.count)
        source = index.read(slice(0, count), layout, known=False)
        try:
            table = read(source, **layout)
        except DataError as error:
            raise DataError(
                f"{error} (The first {count} series decide how all are read that processes share.)"
            ) from error
        _check_count(index, table, count)
        leading = table.leading_series()
        if leading is not table or count == index.count:
            return leading
        count *= 2


def _own(index: _Index, share: slice, layout: dict[str, Any]) -> tuple[Table | None, str | None]:
    """The series of this process, and what their times are."""
    count = share.stop - share.start
    if not count:
        return None, None
    source = index.read(share, layout, known=True)
    table = read(source, **layout)
    _check_count(index, table, count)
    time = table.time_name
    return table, "numbers" if time is None else kind_of_times(source, time)


def _check_count(index: _Index, table: Table, count: int) -> None:
    if table.num_series != count:
        raise DataError(
            f"{index.name}: {count - table.num_series} of its series hold no value; leave them out"
            " of the file."
        )


class _ParquetIndex(_Index):
    """Series of a Parquet file, and the row groups in which they stand."""

    def __init__(self, path: Path, name: str, apart: list[str]) -> None:
        self.name, self._apart = name, apart
        self._file = ParquetRows(path, name, apart)
        found: dict[tuple[Any, ...], int] = {}
        parts: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        for begin, cells in self._file.identifiers():
            source = frame_source(cells, name, "frame")
            lines = source.lines + begin
            check_identified(dataclasses.replace(source, lines=lines), apart)
            sizes = cells.groupby(apart, sort=False, observed=True).size()
            keys = [key if len(apart) > 1 else (key,) for key in sizes.index.tolist()]
            numbers = np.array([found.setdefault(key, len(found)) for key in keys])
            parts.append((begin, begin + len(cells), numbers, sizes.to_numpy()))
        order = ordered(_named(name), apart, list(found))
        self.count, self._text = order.num_series, order.text
        self.rows = np.zeros(order.num_series, int)
        for _, _, numbers, sizes in parts:
            np.add.at(self.rows, order.places[numbers], sizes)
        self._cells = np.fromiter(found, object, len(found))
        self._places = order.places
        self._groups = [(begin, end, order.places[numbers]) for begin, end, numbers, _ in parts]
        self._counting = self._file.counting()

    def read(self, share: slice, layout: dict[str, Any], *, known: bool) -> Source:
        """From the row groups that hold some of them."""
        pandas = optional("pandas")
        wanted = self._cells[(self._places >= share.start) & (self._places < share.stop)].tolist()
        parts = []
        for begin, end, places in self._groups:
            if np.any((places >= share.start) & (places < share.stop)):
                part = self._file.read(begin, end, layout, known=known)
                kept = _isin(part.frame, self._apart, wanted)
                frame = part.frame[kept]
                parts.append(dataclasses.replace(part, frame=frame, lines=part.lines[kept]))
        frame = pandas.concat([part.frame for part in parts], ignore_index=True)
        lines = np.concatenate([part.lines for part in parts])
        known_of_all = {"text": self._text, "counting": self._counting}
        return dataclasses.replace(
            parts[0], frame=frame, lines=lines, num_rows=self._file.count, **known_of_all
        )


def _isin(frame: Any, apart: Sequence[str], wanted: Sequence[tuple[Any, ...]]) -> np.ndarray:
    """Which rows have one of these identifiers."""
    if len(apart) == 1:
        return frame[apart[0]].isin([cells[0] for cells in wanted]).to_numpy()
    return optional("pandas").MultiIndex.from_frame(frame[list(apart)]).isin(wanted)


class _TextIndex(_Index):
    """Series of a file of comma-separated values."""

    def __init__(self, path: Path, name: str, separator: str | None, apart: list[str]) -> None:
        self.name, self._file = name, TextRows(path, name, separator, apart)
        found: dict[tuple[str, ...], int] = {}
        lines: list[int] = []
        for line, cells in self._file.identifiers():
            if cells not in found:
                found[cells] = 0
                lines.append(line)
            found[cells] += 1
        frame = optional("pandas").DataFrame(list(found), columns=apart)
        source = frame_source(frame, name, "frame")
        check_identified(dataclasses.replace(source, lines=np.array(lines), unit="line"), apart)
        order = ordered(_named(name), apart, list(found))
        self.count, self._text = order.num_series, order.text
        self.rows = np.zeros(order.num_series, int)
        np.add.at(self.rows, order.places, list(found.values()))
        self._places = dict(zip(found, order.places.tolist(), strict=True))

    def read(self, share: slice, layout: dict[str, Any], *, known: bool) -> Source:
        """From all rows, one after another."""
        source = self._file.read(lambda cells: share.start <= self._places[cells] < share.stop)
        if known and layout["time"] is None:
            source = dataclasses.replace(source, time_index=None, row_index=None)
        return dataclasses.replace(source, text=self._text, num_rows=self._file.count)


class _NetcdfIndex(_Index):
    """Series of a NetCDF file: a rectangle, in which a series may have fewer rows."""

    def __init__(self, path: Path, name: str, apart: list[str]) -> None:
        self.name, self._file = name, NetcdfSeries(path, name, apart)
        cells = [(label,) for label in self._file.identifiers()]
        order = ordered(_named(name), apart, cells)
        if order.num_series < len(cells):
            raise DataError(f"{name}: two series have the same {apart[0]}; rename one of them.")
        self.count, self._text = order.num_series, order.text
        self.rows = np.full(order.num_series, self._file.rows)
        self._by_place = np.argsort(order.places)

    def read(self, share: slice, layout: dict[str, Any], *, known: bool) -> Source:
        """By their places in the file."""
        source = self._file.read(np.sort(self._by_place[share]), layout)
        return dataclasses.replace(source, text=self._text)


def _named(name: str) -> Source:
    """A table of which nothing but the name is needed, for messages."""
    return Source(None, name, "frame", np.zeros(0, int))
