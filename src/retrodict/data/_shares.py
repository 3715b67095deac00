"""Tables of several processes: each reads only the series of its devices."""

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from retrodict._interface import DataError
from retrodict._learning import SharedSeries
from retrodict.data._chunked import AbstractParts, open_parts
from retrodict.data._files import SUFFIXES
from retrodict.data._identifiers import factorize, ordered
from retrodict.data._reader import read
from retrodict.data._source import ROW_NAMES, Source, parse_numbers
from retrodict.data._summary import Summary, add_up
from retrodict.data._table import MAX_LEADING_ROWS, Table
from retrodict.data._timestamps import kind_of_times
from retrodict.distributed import all_gather_object, by_all, process_slice


@dataclass(frozen=True, eq=False, repr=False)
class SharedTable:
    """A table of which each process holds a share, as returned by `read_shared`.

    Attributes:
        leading: the first series, the same in every process.
        local: the series of this process; `None` if its devices hold none.
        share: their places among all series.
        summary: the summary of all series.
    """

    leading: Table
    local: Table | None
    share: slice
    summary: Summary

    def __repr__(self) -> str:
        count, local = self.summary.num_series, self.share.stop - self.share.start
        return f"SharedTable({count} series, up to {self.summary.longest} rows; {local} local)"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the observed columns."""
        return self.leading.names

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return self.leading.input_names

    @property
    def layout(self) -> dict[str, Any]:
        """The arguments with which `read` reads another table in the same way."""
        return self.leading.layout

    @property
    def source(self) -> str:
        """The path of the file."""
        return self.leading.source

    @property
    def num_series(self) -> int:
        """The number of series of all processes."""
        return self.summary.num_series

    def leading_series(self) -> Table:
        """Return the first series, the same in every process."""
        return self.leading

    def described(self) -> list[str]:
        """Return a description of the table, in lines."""
        return self.leading.described(self.summary)

    def batch(self) -> dict[str, Any]:
        """Return all series as the keyword `ys` of `fit` and `fit_evidence`."""
        return {"ys": self._series}

    @functools.cached_property
    def _series(self) -> SharedSeries:
        if self.local is not None:
            return SharedSeries(**self.local.padded(self.summary.longest).batch())
        shape, width = (0, self.summary.longest), len(self.input_names)
        return SharedSeries(
            np.zeros((*shape, len(self.names))),
            inputs=np.zeros((*shape, width)) if width else None,
            length=np.zeros(0, int),
        )


def read_shared(source: str | os.PathLike[str], **layout: Any) -> Table | SharedTable:
    """Read a table of which each process of a job holds a share.

    All processes call it with the same arguments. Each reads the identifiers of all rows, the first
    series up to 100,000 rows together, and the series of its devices. The first series determine
    what `read` detects: the columns and the step of the times. Pass these if other series differ.
    Of a Parquet file the row groups with the series of the process are read: sort its rows by
    series. Of a NetCDF file these series are read, each of which must hold a value. A text file is
    parsed by each process, which keeps its rows.

    Each process reads the whole table if it has at most 100,000 rows or a single series; if its
    times are irregular and are an input whose unit was not passed; if series of a NetCDF file are
    not identified by one dimension; or if a Parquet file has an index that is not a column.

    Example:
        >>> import tempfile, pandas as pd, retrodict as rd
        >>> frame = pd.DataFrame({"year": [1871, 1872], "flow": [1.0, 2.0]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     frame.to_csv(f"{folder}/nile.csv", index=False)
        ...     table = rd.data.read_shared(f"{folder}/nile.csv")
        >>> table.ys.shape  # a single process holds the whole table
        (1, 2, 1)

    Args:
        source: the path of a `.csv`, `.tsv`, `.parquet` or `.nc` file that all processes can read.
        **layout: the other arguments of `read`, except `pad_to`.

    Returns:
        The whole table or, if processes share it, a `SharedTable`.

    Raises:
        DataError: if the table cannot be read or is inconsistent.
        ValueError: if another process has failed in this way.
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
        texts = ["none, or few rows" if size is None else f"{size[1]} rows" for size in sizes]
        raise DataError(
            f"{os.fspath(source)}: the processes read different files ({'; '.join(texts)}); put it"
            " where all of them can read it."
        )
    if index is None:
        return by_all(lambda: read(source, **layout))
    leading = by_all(lambda: _leading(index, layout))
    has_local_unit = leading.step_unit is not None and leading.step is None
    if leading.num_series == index.count or (has_local_unit and not layout.get("step_unit")):
        return by_all(lambda: read(source, **layout))
    share = process_slice(index.count)
    local, kind = by_all(lambda: _local(index, share, leading.layout))
    kinds = list(dict.fromkeys(kind for kind in all_gather_object(kind) if kind is not None))
    if len(kinds) > 1:
        raise DataError(
            f"{index.name}, column {leading.time_name!r}: the times of some series are {kinds[0]},"
            f" and those of others {kinds[1]}; write all in one way."
        )
    summaries = all_gather_object(None if local is None else local.summary.to_dict())
    summary = add_up([Summary.from_dict(part) for part in summaries if part is not None])
    notes = tuple(dict.fromkeys(leading.notes + summary.notes))
    for name, count in zip(leading.names, summary.num_observed, strict=True):
        if not count:
            raise DataError(
                f"{index.name}, column {name!r}: every value is missing; name the others with"
                f" {{columns}}",
                columns=...,
            )
    return SharedTable(leading, local, share, dataclasses.replace(summary, notes=notes))


class _Index:
    """The series of a file in the order of `read`.

    Attributes:
        name: the path of the file.
        count: the number of series.
        rows: the number of rows of each, at most.
    """

    def __init__(self, file: AbstractParts) -> None:
        self.name, self._file = file.name, file
        source = Source(None, file.name, "frame", np.zeros(0, int), file.unit)
        counters = [name for name in file.columns if name.lower() in ROW_NAMES]
        # The numbers from which each column may count the rows.
        starts = {name: {0, 1} for name in counters if name not in file.keys}
        numbers: dict[tuple[Any, ...], int] = {}
        codes = [np.zeros(0, int)]
        row = 0
        for lines, cells in file.cells([*file.keys, *starts]):
            chunk = dataclasses.replace(source, frame=cells, lines=lines)
            local, identifiers = factorize(chunk, file.keys)
            assigned = [numbers.setdefault(identifier, len(numbers)) for identifier in identifiers]
            codes.append(np.array(assigned)[local])
            for name, possible in starts.items():
                values, _ = parse_numbers(cells[name])
                rows = row + np.arange(len(values))
                possible &= {start for start in possible if np.array_equal(values, start + rows)}
            row += len(cells)
        order = ordered(source, file.keys, list(numbers))
        self._places = order.places[np.concatenate(codes)]
        self.count, self._text = len(order.names), order.text
        counting = tuple(name for name, possible in starts.items() if possible)
        self._counting = counting if starts else None
        self.rows = file.rows * np.bincount(self._places, minlength=self.count)

    def read(self, share: slice, layout: dict[str, Any], *, known: bool) -> Source:
        """Read consecutive series.

        Args:
            share: their places.
            layout: the arguments of `read`.
            known: whether the layout names everything that is to be read.
        """
        chosen = np.flatnonzero((self._places >= share.start) & (self._places < share.stop))
        return dataclasses.replace(
            self._file.read(chosen, layout, known=known),
            text=self._text,
            counting=self._counting,
            num_rows=int(self.rows.sum()),
        )


def _index_of(path: Path, name: str, layout: dict[str, Any]) -> _Index | None:
    """Return the index of a file; `None` if `read` is to read the whole file, or to refuse it."""
    keys: list[str] = list(layout.get("series") or ())
    if not keys or path.suffix.lower() not in SUFFIXES:
        return None
    if not path.is_file() or not path.stat().st_size:
        return None
    file = open_parts(path, name, keys)
    if not file.can_be_split:
        return None
    index = _Index(file)
    return index if index.count > 1 and index.rows.sum() > MAX_LEADING_ROWS else None


def _leading(index: _Index, layout: dict[str, Any]) -> Table:
    """Read the first series, which determine how all are read."""
    # One more than needed, so that the table has more than the leading series.
    count = 1 + int(np.searchsorted(np.cumsum(index.rows), MAX_LEADING_ROWS, side="right"))
    while True:
        count = min(count, index.count)
        source = index.read(slice(0, count), layout, known=False)
        try:
            table = read(source, **layout)
        except DataError as error:
            note = f"(In a shared table the first {count} series determine how all are read.)"
            raise DataError(f"{{error}} {note}", error=error) from error
        _check_count(index, table, count)
        leading = table.leading_series()
        if leading is not table or count == index.count:
            return leading
        count *= 2


def _local(index: _Index, share: slice, layout: dict[str, Any]) -> tuple[Table | None, str | None]:
    """Read the series of this process; return them and the kind of their times."""
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
