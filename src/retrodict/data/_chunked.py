"""Parts of files: rows of a Parquet file, series of a NetCDF file, rows of a text file."""

import dataclasses
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from retrodict._errors import DataError, listed, optional
from retrodict.data._columns import parsed
from retrodict.data._files import (
    check_heaps,
    check_parquet,
    check_size,
    netcdf_engine,
    reading,
    text_records,
    text_source_of,
)
from retrodict.data._objects import from_xarray
from retrodict.data._source import ROW_NAMES, Source, frame_source


class ParquetRows:
    """The rows of a Parquet file, which are read by row groups.

    Args:
        path: the file.
        name: as it is called in messages.
        apart: the columns that tell series apart.

    Attributes:
        name: as above.
        count: how many rows there are.
    """

    def __init__(self, path: Path, name: str, apart: list[str]) -> None:
        self.name, self._apart = name, apart
        self._file = _parquet(path, name)
        known = self._file.schema_arrow.names
        for column in apart:
            if column not in known:
                raise DataError(
                    f"{name}: there is no column {column!r} (series); it has {listed(known)}."
                )
        metadata = self._file.metadata
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._begins = np.concatenate([[0], np.cumsum(counts)]).astype(int)
        self.count = int(self._begins[-1])
        if not self.count:
            raise DataError(f"{name}: there are no rows; add some.")

    @staticmethod
    def are_apart(path: Path, name: str, apart: list[str]) -> bool:
        """Whether columns of a file tell series apart, and parts are read as the whole would be.

        A frame may have been written with a range of numbers as its index that is no column.
        """
        file = _parquet(path, name)

        def read() -> bool:
            schema = file.schema_arrow
            index = (schema.pandas_metadata or {}).get("index_columns", [])
            ranges = [each for each in index if isinstance(each, dict)]
            plain = all((e["start"], e["step"], e["name"]) == (0, 1, None) for e in ranges)
            return plain and all(column in schema.names for column in apart)

        return reading(read, name, "Parquet")

    def counting(self) -> tuple[str, ...]:
        """The columns with such a name that hold the number of the row."""
        names = [name for name in self._file.schema_arrow.names if name.lower() in ROW_NAMES]
        found = []
        for name in names:
            if name not in self._apart and _counts(self._column(name)):
                found.append(name)
        return tuple(found)

    def _column(self, name: str) -> Iterator[np.ndarray]:
        for group in range(len(self._begins) - 1):
            yield parsed(self._frame([group], [name])[name])[0]

    def identifiers(self) -> Iterator[tuple[int, Any]]:
        """The first row of each row group with rows, and a frame of the identifiers of its rows."""
        for group, begin in enumerate(self._begins[:-1]):
            cells = self._frame([group], self._apart)[self._apart]
            if not cells.empty:
                yield int(begin), cells

    def read(self, begin: int, end: int, layout: dict[str, Any], *, known: bool) -> Source:
        """The rows from `begin` to before `end`, from the row groups that hold them.

        Args:
            begin: the first.
            end: the one after the last.
            layout: the arguments of `retrodict.data.read`.
            known: whether they name all that is to be read.
        """
        first = int(np.searchsorted(self._begins, begin, side="right")) - 1
        stop = int(np.searchsorted(self._begins, end, side="left"))
        wanted = None
        if known:
            wanted = [*layout["series"], *layout["columns"], *(layout["inputs"] or ())]
            wanted += [layout["time"]] if layout["time"] else []
        table = self._table(list(range(first, stop)), wanted)
        part = table.slice(begin - self._begins[first], end - begin)
        frame = reading(part.to_pandas, self.name, "Parquet")
        if frame.index.name is None and isinstance(frame.index, optional("pandas").RangeIndex):
            # The number of the row, which a part has only if it is the whole file.
            frame = frame.reset_index(drop=True)
        source = frame_source(frame, self.name, "frame")
        if known and layout["time"] is None:
            source = dataclasses.replace(source, time_index=None, row_index=None)
        return dataclasses.replace(source, lines=source.lines + begin, part=True)

    def _frame(self, groups: list[int], columns: list[str]) -> Any:
        table = self._table(groups, columns)
        return reading(lambda: table.to_pandas(ignore_metadata=True), self.name, "Parquet")

    def _table(self, groups: list[int], columns: list[str] | None) -> Any:
        def read() -> Any:
            return self._file.read_row_groups(groups, columns, use_pandas_metadata=True)

        return reading(read, self.name, "Parquet")


def _parquet(path: Path, name: str) -> Any:
    parquet = optional("pyarrow.parquet")

    def read() -> Any:
        file = parquet.ParquetFile(path)
        check_parquet(file, path.stat().st_size, name)
        return file

    return reading(read, name, "Parquet")


def _counts(parts: Iterator[np.ndarray]) -> bool:
    """Whether numbers count from 0 or 1 on, one part after another."""
    starts, begin = {0, 1}, 0
    for values in parts:
        rows = begin + np.arange(len(values))
        starts = {start for start in starts if np.array_equal(values, start + rows)}
        if not starts:
            return False
        begin += len(values)
    return True


class NetcdfSeries:
    """Variables along a dimension of series.

    Args:
        path: the file.
        name: as it is called in messages.
        apart: the name of that dimension, alone.

    Attributes:
        name: as above.
        count: how many series there are.
        rows: how many rows each has at most.
    """

    def __init__(self, path: Path, name: str, apart: list[str]) -> None:
        self.name, self._apart = name, apart
        self._dataset = _dataset(path, name)
        sizes = {str(dimension): size for dimension, size in self._dataset.sizes.items()}
        if len(apart) != 1 or apart[0] not in sizes:
            raise DataError(
                f"{name}: {listed(apart)} is not a dimension of the file; one that tells series"
                f" apart must be named, and it has {listed(sizes)}."
            )
        self.count = sizes[apart[0]]
        others = [size for dimension, size in sizes.items() if dimension != apart[0]]
        self.rows = max(others, default=1)
        if not self.count:
            raise DataError(f"{name}: there are no series; add some.")

    @staticmethod
    def is_along(path: Path, name: str, apart: list[str]) -> bool:
        """Whether series are told apart by one dimension of a file, and not in another way."""
        with _dataset(path, name) as dataset:
            return len(apart) == 1 and apart[0] in dataset.sizes

    def identifiers(self) -> list[Any]:
        """Of the series, as they stand there."""
        if self._apart[0] not in self._dataset.coords:
            return list(range(self.count))
        return optional("pandas").Series(self._dataset[self._apart[0]].values).tolist()

    def read(self, places: np.ndarray, layout: dict[str, Any]) -> Source:
        """Some of the series, by their places in the file, in increasing order."""
        begin, end = int(places[0]), int(places[-1]) + 1
        # Files are much quicker by slices than by lists.
        rows = slice(begin, end) if end - begin == len(places) else places
        part = reading(
            lambda: self._dataset.isel({self._apart[0]: rows}).load(), self.name, "NetCDF"
        )
        if self._apart[0] not in part.coords:
            part = part.assign_coords({self._apart[0]: places})
        keep = [*(layout.get("columns") or ()), *(layout.get("inputs") or ())]
        source = from_xarray(
            part, self.name, time=layout.get("time"), series=self._apart, keep=keep
        )
        return dataclasses.replace(source, part=True)


def _dataset(path: Path, name: str) -> Any:
    """A NetCDF file of which nothing is in memory yet."""
    xarray = optional("xarray")
    with path.open("rb") as file:
        engine = netcdf_engine(file.read(3))

    def read() -> Any:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            check_heaps(whole)
        dataset = xarray.open_dataset(path, engine=engine, decode_timedelta=False)
        check_size(dataset.nbytes, path.stat().st_size, name)
        return dataset

    return reading(read, name, "NetCDF")


class TextRows:
    """The rows of a file of comma-separated values, which is gone through each time.

    Args:
        path: the file.
        name: as it is called in messages.
        separator: between values; `None` to look for it.
        apart: the columns that tell series apart.

    Attributes:
        name: as above.
        count: how many rows there are, after `identifiers`.
    """

    def __init__(self, path: Path, name: str, separator: str | None, apart: list[str]) -> None:
        self.name, self._path, self._separator = name, path, separator
        header = next(self._records())[1]
        for column in apart:
            if column not in header:
                raise DataError(
                    f"{name}: there is no column {column!r} (series); it has {listed(header)}."
                )
        self._header, self._places = header, [header.index(column) for column in apart]
        self._is_numbered = header[0] == ""
        # The place of each column that may count the rows, and from which number on it would.
        self._counting = {
            place: {0, 1}
            for place, column in enumerate(header)
            if column.lower() in ROW_NAMES and column not in apart
        }
        self.count = 0

    def identifiers(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The line of each row, and its identifiers."""
        for row, (line, cells) in enumerate(self._rows()):
            # A first column without a name that counts all rows says nothing.
            self._is_numbered &= cells[0] == str(row)
            for place, starts in self._counting.items():
                starts &= {start for start in starts if cells[place] == str(start + row)}
            self.count = row + 1
            yield line, tuple(cells[place] for place in self._places)

    def read(self, keep: Callable[[tuple[str, ...]], bool]) -> Source:
        """The rows with these identifiers; only to be asked for after `identifiers`."""
        kept, lines = [], []
        for line, cells in self._rows():
            if keep(tuple(cells[place] for place in self._places)):
                kept.append(cells)
                lines.append(line)
        source = text_source_of(self._header, kept, lines, self.name, self._is_numbered)
        counting = tuple(self._header[place] for place, starts in self._counting.items() if starts)
        return dataclasses.replace(source, part=True, counting=counting)

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        return text_records(self._path, self.name, self._separator)

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        records = self._records()
        next(records)
        return records
