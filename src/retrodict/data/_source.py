"""The internal form of a table: one pandas frame, and the names of its rows in messages."""

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrodict._errors import DataError, Part, listed, optional

TIME_NAMES = ("time", "date", "datetime", "timestamp", "t", "year")

ROW_NAMES = ("rownames", "row", "index", "id")
"""Usual names of a column of row numbers."""


@dataclass(frozen=True)
class Source:
    """A table as one frame of columns.

    Attributes:
        frame: a pandas frame whose index is the row number.
        name: the path of the file, or the type of the object.
        kind: `"array"`, `"frame"` or `"dataset"`: the type that results are converted to.
        lines: the number of each row in messages: the line of a text file, or the row from 1.
        unit: `"line"` or `"row"`.
        index: columns that were the index, or dimensions, of the object: never data.
        time_index: the one of them that is certainly the time.
        row_index: the one of them that is the time if no column is.
        series: the identifier columns that follow from the shape of an array.
        is_part: whether this is a part of a larger table, in which a column may be empty.
        text: identifier columns that hold text elsewhere in the larger table.
        counting: columns of row numbers in the larger table; `None` to detect them here.
        num_rows: the number of rows of the larger table, if known.
    """

    frame: Any
    name: str
    kind: str
    lines: np.ndarray
    unit: str = "row"
    index: tuple[str, ...] = ()
    time_index: str | None = None
    row_index: str | None = None
    series: tuple[str, ...] = ()
    is_part: bool = False
    text: tuple[str, ...] = ()
    counting: tuple[str, ...] | None = None
    num_rows: int | None = None

    def error(self, *parts: Part, row: int | None = None, column: str | None = None) -> DataError:
        """Return an error that begins with the file, the row and the column."""
        where = self.name
        if row is not None:
            where += f", {self.unit} {self.lines[row]}"
        if column is not None:
            where += f", column {column!r}"
        return DataError(f"{where}: ", *parts)

    def require(self, names: Sequence[str], role: str) -> None:
        """Refuse names that are not columns, with the nearest one that is.

        Args:
            names: the required columns.
            role: the argument that named them.
        """
        columns = list(self.frame.columns)
        for name in names:
            if name not in columns:
                near = difflib.get_close_matches(str(name), columns, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                if all(part.strip() in columns for part in str(name).split(",")):
                    hint = " Name these columns one by one."
                raise self.error(no_column(name, role, columns), hint)


def no_column(name: str, role: str, columns: Sequence[str]) -> str:
    """Return the message for a column that does not exist."""
    return f"there is no column {name!r} ({role}); there are {listed(columns)}."


def frame_source(frame: Any, name: str, kind: str) -> Source:
    """Convert a pandas frame; a meaningful index becomes columns."""
    pandas = optional("pandas")
    frame = frame.copy(deep=False)
    if isinstance(frame.columns, pandas.MultiIndex):
        raise DataError(f"{name}: the columns have several levels; give them one name each.")
    frame.columns = [str(column) for column in frame.columns]
    index = frame.index
    is_range = isinstance(index, pandas.RangeIndex) and index.name is None
    default = is_range and index.equals(pandas.RangeIndex(len(index)))
    levels = () if default else _level_names(index.names)
    check_names([*levels, *frame.columns], name)
    time_index = row_index = None
    if len(levels) == 1:
        if isinstance(index, pandas.DatetimeIndex | pandas.PeriodIndex):
            time_index = levels[0]
        elif pandas.api.types.is_numeric_dtype(index.dtype):
            row_index = levels[0]
    if levels:
        frame.index = index.set_names(list(levels))
    frame = frame.reset_index(drop=not levels)
    lines = np.arange(1, len(frame) + 1)
    return Source(frame, name, kind, lines, "row", levels, time_index, row_index)


def _level_names(names: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of the levels of an index; one without a name is called `index`."""
    if len(names) == 1:
        return ("index" if names[0] is None else str(names[0]),)
    return tuple(f"index{i}" if name is None else str(name) for i, name in enumerate(names))


def check_names(names: Sequence[str], owner: str) -> None:
    """Refuse two columns of the same name."""
    double = sorted(name for name, count in Counter(names).items() if count > 1)
    if double:
        raise DataError(f"{owner}: two columns are called {double[0]!r}; rename one of them.")
