"""Where a table came from: its frame, and how to name a row of it in a message."""

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrodict._errors import DataError, listed, optional

TIME_NAMES = ("time", "date", "datetime", "timestamp", "t", "year")

ROW_NAMES = ("rownames", "row", "index", "id")
"""What many programs call the number of the row."""


@dataclass(frozen=True)
class Source:
    """A table as one frame of columns.

    Attributes:
        frame: a pandas frame whose index is the row number.
        name: the file as it was given, or what kind of object it was.
        kind: `"array"`, `"frame"` or `"dataset"`: what results are turned into.
        lines: the number by which each row is known: the line of a text file, or the row from 1.
        unit: `"line"` or `"row"`.
        index: columns that were the index, or dimensions, of what was given: never data.
        time_index: the one of them that is surely the time.
        row_index: the one of them that is the time if nothing else is.
        series: the column that tells series apart where the shape says so.
        part: whether it is a part of a larger table, in which a column may hold nothing.
        text: columns of identifiers that are text elsewhere in that table, if whole numbers here.
        counting: columns that hold the number of the row, where a part cannot tell; else `None`.
        num_rows: how many rows that table has, if it is known.
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
    part: bool = False
    text: tuple[str, ...] = ()
    counting: tuple[str, ...] | None = None
    num_rows: int | None = None

    def error(
        self, message: str, *, row: int | None = None, column: str | None = None
    ) -> DataError:
        """An error that begins with where it is."""
        where = self.name
        if row is not None:
            where += f", {self.unit} {self.lines[row]}"
        if column is not None:
            where += f", column {column!r}"
        return DataError(f"{where}: {message}")

    def require(self, names: Sequence[str], role: str) -> None:
        """Refuses names that are no column, with the nearest that is."""
        known = list(self.frame.columns)
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                if all(part.strip() in known for part in str(name).split(",")):
                    hint = " Name these columns one by one."
                raise self.error(
                    f"there is no column {name!r} ({role}); it has {listed(known)}.{hint}"
                )


def frame_source(frame: Any, name: str, kind: str) -> Source:
    """A pandas frame, with its index turned into columns where it says something."""
    pandas = optional("pandas")
    frame = frame.copy(deep=False)
    if isinstance(frame.columns, pandas.MultiIndex):
        raise DataError(f"{name}: columns with several levels; give them one name each.")
    frame.columns = [str(column) for column in frame.columns]
    index = frame.index
    lines = np.arange(1, len(frame) + 1)
    default = (
        isinstance(index, pandas.RangeIndex)
        and index.name is None
        and index.start == 0
        and index.step == 1
    )
    levels = () if default else tuple(index_names(index.names))
    check_names([*levels, *frame.columns], name)
    time_index = row_index = None
    if len(levels) == 1:
        if isinstance(index, pandas.DatetimeIndex | pandas.PeriodIndex):
            time_index = levels[0]
        elif pandas.api.types.is_numeric_dtype(index.dtype):
            row_index = levels[0]
    if levels:
        frame.index = index.set_names(list(levels))
        frame = frame.reset_index()
    else:
        frame = frame.reset_index(drop=True)
    return Source(frame, name, kind, lines, "row", levels, time_index, row_index)


def index_names(names: Sequence[Any]) -> list[str]:
    """Names of the levels of an index; one without a name is called `index`."""
    if len(names) == 1:
        return ["index" if names[0] is None else str(names[0])]
    return [f"index{i}" if name is None else str(name) for i, name in enumerate(names)]


def check_names(names: Sequence[str], owner: str) -> None:
    """Refuses two columns of one name."""
    double = sorted(name for name, count in Counter(names).items() if count > 1)
    if double:
        raise DataError(f"{owner}: two columns are called {double[0]!r}; rename one of them.")
