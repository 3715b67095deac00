"""Parts of files: rows of a Parquet or text file, series of a NetCDF file."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from retrodict._interface import DataError, optional
from retrodict.data._files import (
    SEPARATORS,
    open_netcdf,
    open_parquet,
    read_binary,
    rows_source,
    text_lines,
    text_records,
    validated,
)
from retrodict.data._objects import from_xarray
from retrodict.data._source import Source, frame_source, no_column

CHUNK_ROWS = 100_000
"""Rows of a text file whose identifiers are in memory at the same time."""


class AbstractParts(ABC):
    """A file of which parts are read: some of its rows or, of a NetCDF file, of its series.

    Attributes:
        name: the path of the file in messages.
        keys: the columns, or the dimension, that identify series.
        columns: the names of all columns of a table.
        unit: what a number of a row counts in messages.
        count: the number of parts; of a text file after `cells`.
        rows: the number of rows of a part, at most.
        can_be_split: whether parts are read like the whole file.
    """

    unit = "row"
    rows = 1
    can_be_split = True

    def __init__(self, path: Path, name: str, keys: list[str]) -> None:
        self.path, self.name, self.keys = path, name, keys
        self.columns: list[str] = []
        self.count = 0

    @abstractmethod
    def cells(self, columns: list[str]) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the numbers of rows in messages, and a frame of some columns, in chunks.

        Of a NetCDF file the only column is the identifier of each series.
        """

    def read(self, places: np.ndarray, layout: dict[str, Any], *, known: bool) -> Source:
        """Read some parts.

        Args:
            places: their numbers from 0, in increasing order.
            layout: the arguments of `retrodict.data.read`.
            known: whether the layout names everything that is to be read.
        """
        source = dataclasses.replace(self._read(places, layout, known), is_part=True)
        if known and layout["time"] is None:  # the row number is the time
            return dataclasses.replace(source, time_index=None, row_index=None)
        return source

    @abstractmethod
    def _read(self, places: np.ndarray, layout: dict[str, Any], known: bool) -> Source: ...

    def _require(self, columns: list[str]) -> None:
        for column in columns:
            if column not in self.columns:
                raise DataError(f"{self.name}: {no_column(column, 'series', self.columns)}")


def open_parts(path: Path, name: str, keys: list[str]) -> AbstractParts:
    """Open a file by its suffix, which is one of those that `read` takes."""
    kinds = {".parquet": ParquetRows, ".nc": NetcdfSeries}
    return kinds.get(path.suffix.lower(), TextRows)(path, name, keys)


class ParquetRows(AbstractParts):
    """The rows of a Parquet file, which is read by row groups."""

    def __init__(self, path: Path, name: str, keys: list[str]) -> None:
        super().__init__(path, name, keys)
        self._file = open_parquet(path, name)
        self.columns = self._file.schema_arrow.names
        metadata = self._file.metadata
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._begins = np.concatenate([[0], np.cumsum(counts)]).astype(int)
        self.count = int(self._begins[-1])

    @property
    def can_be_split(self) -> bool:
        """Whether the keys are columns, and parts are read like the whole file.

        pandas may have stored a range of numbers as the index, which is not a column.
        """

        def read() -> bool:
            schema = self._file.schema_arrow
            index = (schema.pandas_metadata or {}).get("index_columns", [])
            ranges = [each for each in index if isinstance(each, dict)]
            plain = all((e["start"], e["step"], e["name"]) == (0, 1, None) for e in ranges)
            return plain and set(self.keys) <= set(self.columns)

        return read_binary(read, self.name, "Parquet")

    def cells(self, columns: list[str]) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the row numbers from 1 of each row group, and a frame of some columns."""
        self._require(columns)
        for group, begin in enumerate(self._begins[:-1]):
            table = self._table([group], columns)
            if len(table):
                convert = partial(table.to_pandas, ignore_metadata=True)
                frame = read_binary(convert, self.name, "Parquet")
                yield begin + 1 + np.arange(len(frame)), frame[columns]

    def _read(self, places: np.ndarray, layout: dict[str, Any], known: bool) -> Source:
        """Read the row groups that hold some rows, and select these."""
        group_of = np.searchsorted(self._begins, places, side="right") - 1
        groups = np.unique(group_of)
        columns = None
        if known:
            columns = [*layout["series"], *layout["columns"], *(layout["inputs"] or ())]
            columns += [layout["time"]] if layout["time"] else []
        table = self._table(groups.tolist(), columns)
        # Where the row groups begin in the table.
        sizes = (self._begins[groups + 1] - self._begins[groups])[:-1]
        offset = np.concatenate([[0], np.cumsum(sizes)]) - self._begins[groups]
        rows_in_table = places + offset[np.searchsorted(groups, group_of)]
        if places[-1] - places[0] + 1 == len(places):  # without a copy
            part = table.slice(rows_in_table[0], len(places))
        else:
            part = table.take(rows_in_table)
        frame = read_binary(part.to_pandas, self.name, "Parquet")
        if frame.index.name is None and isinstance(frame.index, optional("pandas").RangeIndex):
            # The number of the row, which only the whole file has.
            frame = frame.reset_index(drop=True)
        return dataclasses.replace(frame_source(frame, self.name, "frame"), lines=places + 1)

    def _table(self, groups: list[int], columns: list[str] | None) -> Any:
        def read() -> Any:
            table = self._file.read_row_groups(groups, columns, use_pandas_metadata=True)
            return validated(table)

        return read_binary(read, self.name, "Parquet")


class TextRows(AbstractParts):
    """The rows of a file of comma-separated values, which is parsed from its start each time."""

    unit = "line"

    def __init__(self, path: Path, name: str, keys: list[str]) -> None:
        super().__init__(path, name, keys)
        self.columns = next(self._records())[1]

    def cells(self, columns: list[str]) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the lines of rows, and a frame of some columns, chunk by chunk."""
        self._require(columns)
        places = [self.columns.index(column) for column in columns]
        records = islice(self._records(), 1, None)
        self.count, self._is_numbered = 0, self.columns[0] == ""
        while chunk := list(islice(records, CHUNK_ROWS)):
            lines, rows = zip(*chunk, strict=True)
            # A first column without a name that counts all rows is not an index.
            numbers = [str(self.count + i) for i in range(len(rows))]
            self._is_numbered &= [row[0] for row in rows] == numbers
            self.count += len(rows)
            selected = [[row[place] for place in places] for row in rows]
            yield (
                np.array(lines),
                optional("pandas").DataFrame(selected, columns=columns, dtype=object),
            )

    def _read(self, places: np.ndarray, layout: dict[str, Any], known: bool) -> Source:
        """Select some rows, after `cells`."""
        is_selected = np.zeros(self.count, bool)
        is_selected[places] = True
        rows = islice(self._records(), 1, None)
        records = [record for record, keep in zip(rows, is_selected, strict=True) if keep]
        return rows_source(self.columns, records, self.name, self._is_numbered)

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        separator = SEPARATORS[self.path.suffix.lower()]
        return text_records(text_lines(self.path, self.name), self.name, separator)


class NetcdfSeries(AbstractParts):
    """Variables of a NetCDF file along a dimension of series."""

    def __init__(self, path: Path, name: str, keys: list[str]) -> None:
        super().__init__(path, name, keys)
        self._dataset = open_netcdf(path, name)
        sizes = {str(dimension): size for dimension, size in self._dataset.sizes.items()}
        self.dimensions = list(sizes)
        self.can_be_split = len(keys) == 1 and keys[0] in sizes
        self.count = sizes.pop(keys[0], 0)
        self.rows = max(sizes.values(), default=1)

    def cells(self, columns: list[str]) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the numbers of the series from 1, and a frame of their identifiers."""
        (key,) = columns
        labels: Any = range(self.count)
        if key in self._dataset.coords:
            labels = self._dataset[key].values
        frame = optional("pandas").DataFrame({key: labels})
        if frame[key].duplicated().any():
            raise DataError(f"{self.name}: two series have the same {key}; rename one of them.")
        yield 1 + np.arange(self.count), frame

    def _read(self, places: np.ndarray, layout: dict[str, Any], known: bool) -> Source:
        (key,), begin, end = self.keys, int(places[0]), int(places[-1]) + 1
        # Slices of files are read much faster than lists.
        chosen = slice(begin, end) if end - begin == len(places) else places
        part = read_binary(lambda: self._dataset.isel({key: chosen}).load(), self.name, "NetCDF")
        if key not in part.coords:
            part = part.assign_coords({key: places})
        keep = [*(layout.get("columns") or ()), *(layout.get("inputs") or ())]
        return from_xarray(part, self.name, time=layout.get("time"), series=self.keys, keep=keep)
