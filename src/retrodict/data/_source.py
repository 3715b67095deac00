"""The internal form of a table: one pandas frame, the names of its rows, and its numbers."""

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrodict._interface import DataError, listed, optional, shorten

TIME_NAMES = ("time", "date", "datetime", "timestamp", "t", "year")

ROW_NAMES = ("rownames", "row", "index", "id")
"""Usual names of a column of row numbers."""

# The marks of missing values that pandas reads, and no others: "-" or "-999" may mean something.
MISSING = frozenset(
    ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"]
    + ["<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"]
)
LARGEST = 1e150
"""Squares of larger numbers overflow."""


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

    def error(
        self, text: str, *, row: int | None = None, column: str | None = None, **arguments: Any
    ) -> DataError:
        """Return an error that begins with the file, the row and the column."""
        where = self.name
        if row is not None:
            where += f", {self.unit} {self.lines[row]}"
        if column is not None:
            where += f", column {column!r}"
        return DataError(f"{where}: {text}", **arguments)

    def refuse(self, wrong: np.ndarray, column: str, text: str) -> None:
        """Refuse the first row at which `wrong` is true, if any."""
        if wrong.any():
            raise self.error(text, row=int(np.argmax(wrong)), column=column)

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
                raise self.error(no_column(name, role, columns) + hint)

    def numbers(self, column: str) -> np.ndarray:
        """Return a column as float64, with NaN for missing values.

        Raises:
            DataError: if it holds text, an infinity or a number beyond 1e150, with its row.
        """
        values, invalid = parse_numbers(self.frame[column])
        if invalid.any():
            cell = self.frame[column].iloc[int(np.argmax(invalid))]
            decimal = isinstance(cell, str) and "," in cell
            hint = "write a decimal point and no other separator" if decimal else "correct it"
            text = f"{shorten(cell)} is not a number; {hint}, or leave it empty if missing."
            self.refuse(invalid, column, text)
        huge = np.abs(values) > LARGEST
        if huge.any():
            value = f"the value {values[np.argmax(huge)]:g} is infinite or beyond {LARGEST:g}"
            self.refuse(huge, column, f"{value}; correct it, or leave it empty if missing.")
        return values

    def stack(self, names: Sequence[str]) -> np.ndarray:
        """Return columns of numbers as an array of shape `(row, column)`."""
        columns = [self.numbers(name) for name in names]
        return np.stack(columns, axis=1) if columns else np.zeros((len(self.frame), 0))

    def inputs(self, names: Sequence[str]) -> np.ndarray | None:
        """Return columns of inputs, `None` if there are none; refuse missing values."""
        values = self.stack(names)
        for name, column in zip(names, values.T, strict=True):
            text = "an input is missing; inputs are needed in every row, so fill it in."
            self.refuse(np.isnan(column), name, text)
        return values if names else None

    def counts_rows(self, column: str) -> bool:
        """Return whether a column is the number of the row, which many programs write."""
        if column.lower() not in ROW_NAMES:
            return False
        if self.counting is not None:
            return column in self.counting
        values, _ = parse_numbers(self.frame[column])
        return any(np.array_equal(values, start + np.arange(len(values))) for start in (0, 1))


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
    index, time_index, row_index = frame.index, None, None
    is_range = isinstance(index, pandas.RangeIndex) and index.name is None
    levels: list[str] = []
    if not (is_range and index.equals(pandas.RangeIndex(len(index)))):
        default = [f"index{i}" if index.nlevels > 1 else "index" for i in range(index.nlevels)]
        pairs = zip(index.names, default, strict=True)
        levels = [other if name is None else str(name) for name, other in pairs]
        frame.index = index.set_names(levels)
    check_names([*levels, *frame.columns], name)
    if len(levels) == 1:
        if isinstance(index, pandas.DatetimeIndex | pandas.PeriodIndex):
            time_index = levels[0]
        elif pandas.api.types.is_numeric_dtype(index.dtype):
            row_index = levels[0]
    frame = frame.reset_index(drop=not levels)
    lines = np.arange(1, len(frame) + 1)
    return Source(frame, name, kind, lines, "row", tuple(levels), time_index, row_index)


def check_names(names: Sequence[str], owner: str) -> None:
    """Refuse two columns of the same name."""
    double = sorted(name for name, count in Counter(names).items() if count > 1)
    if double:
        raise DataError(f"{owner}: two columns are called {double[0]!r}; rename one of them.")


def missing_cells(series: Any) -> np.ndarray:
    """Return which cells of a pandas series are empty, NaN or a mark of missing values."""
    absent, types = series.isna().to_numpy(), optional("pandas").api.types
    if types.is_numeric_dtype(series.dtype) or types.is_datetime64_any_dtype(series.dtype):
        return absent
    cells = series.tolist()
    return absent | np.array([isinstance(c, str) and c.strip() in MISSING for c in cells], bool)


def parse_numbers(series: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of a pandas series, and which cells hold something else."""
    pandas = optional("pandas")
    types = pandas.api.types
    if types.is_numeric_dtype(series.dtype) and not types.is_complex_dtype(series.dtype):
        values = series.to_numpy(dtype=float, na_value=np.nan)
        return values, np.zeros(len(values), bool)
    cells = pandas.Series([_number_or_text(cell) for cell in series.tolist()], dtype=object)
    values = pandas.to_numeric(cells, errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    return values, np.isnan(values) & ~missing_cells(series)


def _number_or_text(cell: Any) -> float | str:
    numeric = isinstance(cell, int | float | np.number | np.bool_)
    if not numeric and type(cell).__name__ not in ("Decimal", "Fraction"):
        return str(cell)
    try:
        return float(cell)
    except OverflowError:  # an integer of Python may have any size
        return np.inf
