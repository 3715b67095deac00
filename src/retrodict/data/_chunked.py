"""Parts of files: rows of a Parquet or text file, series of a NetCDF file."""

import dataclasses
import mmap
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from retrodict._errors import DataError, listed, optional
from retrodict.data._columns import parse_numbers
from retrodict.data._files import (
    check_heaps,
    check_parquet,
    check_size,
    netcdf_engine,
    read_binary,
    rows_source,
    text_records,
)
from retrodict.data._objects import from_xarray
from retrodict.data._source import ROW_NAMES, Source, frame_source, no_column

CHUNK_ROWS = 100_000
"""Rows of a text file whose identifiers are in memory at the same time."""


class ParquetRows:
    """The rows of a Parquet file, which is read by row groups.

    Args:
        path: the file.
        name: its name in messages.
        keys: the columns that identify series.

    Attributes:
        name: as above.
        count: the number of rows.
    """

    unit = "row"

    def __init__(self, path: Path, name: str, keys: list[str]) -> None:
        self.name, self._keys = name, keys
        self._file = _parquet(path, name)
        for column in keys:
            if column not in self._file.schema_arrow.names:
                columns = self._file.schema_arrow.names
                raise DataError(f"{name}: {no_column(column, 'series', columns)}")
        metadata = self._file.metadata
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._begins = np.concatenate([[0], np.cumsum(counts)]).astype(int)
        self.count = int(self._begins[-1])
        if not self.count:
            raise DataError(f"{name}: there are no rows; add some.")

    @staticmethod
    def can_be_split(path: Path, name: str, keys: list[str]) -> bool:
        """Return whether `keys` are columns, and parts are read like the whole file.

        pandas may have stored a range of numbers as the index, which is not a column.
        """
        file = _parquet(path, name)

        def read() -> bool:
            schema = file.schema_arrow
            index = (schema.pandas_metadata or {}).get("index_columns", [])
            ranges = [each for each in index if isinstance(each, dict)]
            plain = all((e["start"], e["step"], e["name"]) == (0, 1, None) for e in ranges)
            return plain and all(column in schema.names for column in keys)

        return read_binary(read, name, "Parquet")

    def counting(self) -> tuple[str, ...]:
        """Return the columns that hold the number of the row, by their name and values."""
        names = [name for name in self._file.schema_arrow.names if name.lower() in ROW_NAMES]
        return tuple(name for name in names if name not in self._keys and self._counts(name))

    def _counts(self, column: str) -> bool:
        """Return whether a column counts rows from 0 or 1."""
        starts = {0, 1}
        for begin, frame in self._groups([column]):
            values, _ = parse_numbers(frame[column])
            rows = begin + np.arange(len(values))
            starts = {start for start in starts if np.array_equal(values, start + rows)}
        return bool(starts)

    def identifiers(self) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the row numbers from 1 of each row group, and a frame of its identifiers."""
        for begin, frame in self._groups(self._keys):
            yield begin + 1 + np.arange(len(frame)), frame[self._keys]

    def _groups(self, columns: list[str]) -> Iterator[tuple[int, Any]]:
        for group, begin in enumerate(self._begins[:-1]):
            table = self._table([group], columns)
            if len(table):
                convert = lambda table=table: table.to_pandas(ignore_metadata=True)  # noqa: E731
                yield int(begin), read_binary(convert, self.name, "Parquet")

    def read(self, rows: np.ndarray, layout: dict[str, Any], *, known: bool) -> Source:
        """Read some rows, from the row groups that hold them.

        Args:
            rows: their numbers from 0, in increasing order.
            layout: the arguments of `retrodict.data.read`.
            known: whether the layout names everything that is to be read.
        """
        group_of = np.searchsorted(self._begins, rows, side="right") - 1
        groups = np.unique(group_of)
        columns = None
        if known:
            columns = [*layout["series"], *layout["columns"], *(layout["inputs"] or ())]
            columns += [layout["time"]] if layout["time"] else []
        table = self._table(groups.tolist(), columns)
        # Where the row groups begin in the table.
        sizes = (self._begins[groups + 1] - self._begins[groups])[:-1]
        offset = np.concatenate([[0], np.cumsum(sizes)]) - self._begins[groups]
        rows_in_table = rows + offset[np.searchsorted(groups, group_of)]
        if rows[-1] - rows[0] + 1 == len(rows):  # without a copy
            part = table.slice(rows_in_table[0], len(rows))
        else:
            part = table.take(rows_in_table)
        frame = read_binary(part.to_pandas, self.name, "Parquet")
        if frame.index.name is None and isinstance(frame.index, optional("pandas").RangeIndex):
            # The number of the row, which only the whole file has.
            frame = frame.reset_index(drop=True)
        source = dataclasses.replace(
            frame_source(frame, self.name, "frame"), lines=rows + 1, is_part=True
        )
        return without_time(source) if known and layout["time"] is None else source

    def _table(self, groups: list[int], columns: list[str] | None) -> Any:
        def read() -> Any:
            return self._file.read_row_groups(groups, columns, use_pandas_metadata=True)

        return read_binary(read, self.name, "Parquet")


def without_time(source: Source) -> Source:
    """Return a part of a table in which the row number is the time."""
    return dataclasses.replace(source, time_index=None, row_index=None)


def _parquet(path: Path, name: str) -> Any:
    parquet = optional("pyarrow.parquet")

    def read() -> Any:
        file = parquet.ParquetFile(path)
        check_parquet(file, path.stat().st_size, name)
        return file

    return read_binary(read, name, "Parquet")


class TextRows:
    """The rows of a file of comma-separated values, which is parsed from its start each time.

    Args:
        path: the file.
        name: its name in messages.
        separator: between values; detected if `None`.
        keys: the columns that identify series.

    Attributes:
        name: as above.
        count: the number of rows, after `identifiers`.
    """

    unit = "line"

    def __init__(self, path: Path, name: str, separator: str | None, keys: list[str]) -> None:
        self.name, self._path, self._separator, self._keys = name, path, separator, keys
        header = next(self._records())[1]
        for column in keys:
            if column not in header:
                raise DataError(f"{name}: {no_column(column, 'series', header)}")
        self._header, self._places = header, [header.index(column) for column in keys]
        self._is_numbered = header[0] == ""
        # The place of each column that may count the rows, and the numbers it may start from.
        self._counting = {
            place: {0, 1}
            for place, column in enumerate(header)
            if column.lower() in ROW_NAMES and column not in keys
        }
        self.count = 0

    def identifiers(self) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the lines of rows, and a frame of their identifiers, chunk by chunk."""
        records = self._rows()
        self.count = 0
        while chunk := list(islice(records, CHUNK_ROWS)):
            for row, (_, cells) in enumerate(chunk, start=self.count):
                # A first column without a name that counts all rows is not an index.
                self._is_numbered &= cells[0] == str(row)
                for place, starts in self._counting.items():
                    starts &= {start for start in starts if cells[place] == str(start + row)}
            self.count += len(chunk)
            keys = [[cells[place] for place in self._places] for _, cells in chunk]
            frame = optional("pandas").DataFrame(keys, columns=self._keys, dtype=object)
            yield np.array([line for line, _ in chunk]), frame

    def counting(self) -> tuple[str, ...]:
        """Return the columns that hold the number of the row, after `identifiers`."""
        return tuple(self._header[place] for place, starts in self._counting.items() if starts)

    def read(self, rows: np.ndarray, layout: dict[str, Any], *, known: bool) -> Source:
        """Read some rows, after `identifiers`; the arguments are those of `ParquetRows.read`."""
        wanted = np.zeros(self.count, bool)
        wanted[rows] = True
        records = [record for record, keep in zip(self._rows(), wanted, strict=True) if keep]
        lines, cells = zip(*records, strict=True)
        source = rows_source(self._header, cells, lines, self.name, self._is_numbered)
        source = dataclasses.replace(source, is_part=True)
        return without_time(source) if known and layout["time"] is None else source

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        return text_records(self._path, self.name, self._separator)

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        return islice(self._records(), 1, None)


class NetcdfSeries:
    """Variables of a NetCDF file along a dimension of series.

    Args:
        path: the file.
        name: its name in messages.
        keys: the name of that dimension.

    Attributes:
        name: as above.
        count: the number of series.
        rows: the number of rows per series, at most.
    """

    def __init__(self, path: Path, name: str, keys: list[str]) -> None:
        self.name, self._keys = name, keys
        self._dataset = _dataset(path, name)
        sizes = {str(dimension): size for dimension, size in self._dataset.sizes.items()}
        if len(keys) != 1 or keys[0] not in sizes:
            raise DataError(
                f"{name}: {listed(keys)} is not a dimension of the file; name the one that"
                f" identifies series out of {listed(sizes)}."
            )
        self.count = sizes.pop(keys[0])
        self.rows = max(sizes.values(), default=1)
        if not self.count:
            raise DataError(f"{name}: there are no series; add some.")

    @staticmethod
    def can_be_split(path: Path, name: str, keys: list[str]) -> bool:
        """Return whether one dimension of the file identifies series."""
        with _dataset(path, name) as dataset:
            return len(keys) == 1 and keys[0] in dataset.sizes

    def identifiers(self) -> list[Any]:
        """Return the identifiers of the series, in the order of the file."""
        if self._keys[0] not in self._dataset.coords:
            return list(range(self.count))
        return optional("pandas").Series(self._dataset[self._keys[0]].values).tolist()

    def read(self, places: np.ndarray, layout: dict[str, Any], *, known: bool) -> Source:
        """Read some series, by their places in the file in increasing order.

        The arguments are those of `ParquetRows.read`.
        """
        begin, end = int(places[0]), int(places[-1]) + 1
        # Slices of files are read much faster than lists.
        rows = slice(begin, end) if end - begin == len(places) else places
        part = read_binary(
            lambda: self._dataset.isel({self._keys[0]: rows}).load(), self.name, "NetCDF"
        )
        if self._keys[0] not in part.coords:
            part = part.assign_coords({self._keys[0]: places})
        keep = [*(layout.get("columns") or ()), *(layout.get("inputs") or ())]
        source = from_xarray(part, self.name, time=layout.get("time"), series=self._keys, keep=keep)
        return dataclasses.replace(source, is_part=True)


def _dataset(path: Path, name: str) -> Any:
    """Open a NetCDF file without loading its arrays."""
    xarray = optional("xarray")
    with path.open("rb") as file:
        engine = netcdf_engine(file.read(3))

    def read() -> Any:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            check_heaps(whole)
        dataset = xarray.open_dataset(path, engine=engine, decode_timedelta=False)
        check_size(dataset.nbytes, path.stat().st_size, name)
        return dataset

    return read_binary(read, name, "NetCDF")
