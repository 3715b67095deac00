"""The time column: which one it is, and its cells as dates or numbers."""

import re
from collections.abc import Sequence
from datetime import date
from typing import Any

import numpy as np

from retrodict.data._columns import is_missing, missing_cells, parsed
from retrodict.data._errors import listed, optional, shorten
from retrodict.data._source import TIME_NAMES, Source

OFFSET = re.compile(r"(Z|[+-]\d\d(:?\d\d)?)$")
QUARTER = re.compile(r"^(\d{4})[- ]?Q([1-4])$")
WEEK = re.compile(r"^(\d{4})[- ]?W(\d\d)$")
ISO = re.compile(r"^\d{4}-\d\d")


def find_time(source: Source, given: str | None, taken: Sequence[str]) -> str | None:
    """The name of the time column; `None` if the row number is the time.

    Args:
        source: the table.
        given: the name that was asked for, if any.
        taken: columns that have another role.

    Raises:
        DataError: if there is no such column, or if there are several candidates.
    """
    if given is not None:
        source.require([given], "time")
        return given
    if source.time_index is not None:
        return source.time_index
    free = [column for column in source.frame.columns if column not in taken]
    for candidates in (
        [column for column in free if column.lower() in TIME_NAMES],
        [column for column in free if _holds_dates(source.frame[column])],
    ):
        if len(candidates) > 1:
            raise source.error(
                f"which of the columns {listed(candidates)} is the time? Say so with time=..."
            )
        if candidates:
            return candidates[0]
    return source.row_index


def _holds_dates(series: Any) -> bool:
    """Whether a column holds dates, or text that begins like a date in each of its first cells."""
    types = optional("pandas").api.types
    if types.is_datetime64_any_dtype(series.dtype) or str(series.dtype).startswith("period"):
        return True
    if types.is_numeric_dtype(series.dtype) or types.is_bool_dtype(series.dtype):
        return False
    cells = [str(cell).strip() for cell in series.iloc[:50].tolist() if not is_missing(cell)]
    return bool(cells) and all(
        ISO.match(cell) or QUARTER.match(cell) or WEEK.match(cell) for cell in cells
    )


def stamps(source: Source, column: str, time_format: str | None) -> np.ndarray:
    """A time column as `datetime64[us]`, as integers where all are whole, or as float64.

    Dates are read by ISO 8601 or the format that is given, and never guessed: in 03/04/2020 day and
    month cannot be told apart. Times with an offset are turned into UTC.

    Raises:
        DataError: if a cell is missing or cannot be read, with its row.
    """
    pandas = optional("pandas")
    series = source.frame[column]
    gone = missing_cells(series)
    if gone.any():
        raise source.error(
            "the time is missing; fill it in or remove the row.",
            row=int(np.argmax(gone)),
            column=column,
        )
    if str(series.dtype).startswith("period"):
        series = series.dt.to_timestamp()
    if pandas.api.types.is_datetime64_any_dtype(series.dtype):
        return _microseconds(source, column, series)
    if time_format is None:
        values, wrong = parsed(series)
        if not wrong.any():
            return _numeric(source, column, values)
    return _dates(source, column, [_text(cell) for cell in series.tolist()], time_format)


def kind_of_times(source: Source, column: str) -> str:
    """What the times of a column are, by its first cell, as others of it must be too.

    Args:
        source: a table of which `stamps` has read the column.
        column: the time column.
    """
    cells = source.frame[column].iloc[:1]
    if not parsed(cells)[1].any():
        return "numbers"
    (cell,) = cells.tolist()
    zoned = getattr(cell, "tzinfo", None) is not None or OFFSET.search(str(cell).strip()[10:])
    return "dates with an offset from UTC" if zoned else "dates"


def _text(cell: Any) -> str:
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell).strip()


def _numeric(source: Source, column: str, values: np.ndarray) -> np.ndarray:
    infinite = ~np.isfinite(values)
    if infinite.any():
        row = int(np.argmax(infinite))
        raise source.error("the time is infinite; correct it.", row=row, column=column)
    whole = bool(np.all(values == np.round(values)) and np.all(np.abs(values) < 2**53))
    if whole and "date" in column.lower() and _look_like_dates(values):
        raise source.error(
            f"is {int(values[0])} a date? Say so with time_format='%Y%m%d', or name the column"
            " otherwise if it is a number.",
            row=0,
            column=column,
        )
    return values.astype(np.int64) if whole else values


def _look_like_dates(values: np.ndarray) -> bool:
    day, month = values % 100, values // 100 % 100
    years = (values >= 1e7) & (values < 1e8)
    return bool(np.all(years & (day >= 1) & (day <= 31) & (month >= 1) & (month <= 12)))


def _dates(source: Source, column: str, cells: list[str], time_format: str | None) -> np.ndarray:
    pandas = optional("pandas")
    if time_format is None:
        cells = _first_days(cells)
        offsets = np.array([bool(OFFSET.search(cell[10:])) for cell in cells], bool)
        if offsets.any() and not offsets.all():
            raise source.error(
                "some times have an offset from UTC and some have none; write all in one way.",
                row=int(np.argmin(offsets)),
                column=column,
            )
    try:
        found = pandas.to_datetime(
            pandas.Series(cells, dtype=object),
            format=time_format or "ISO8601",
            errors="coerce",
            utc=True,
        )
    except ValueError as error:
        raise source.error(
            f"time_format {time_format!r} is not understood ({error}); write e.g. '%d/%m/%Y'.",
            column=column,
        ) from None
    wrong = found.isna().to_numpy()
    if wrong.any():
        row = int(np.argmax(wrong))
        way = "ISO 8601 (2020-12-31)" if time_format is None else f"the format {time_format!r}"
        hint = "correct it, or give time_format='%d/%m/%Y' or the like"
        raise source.error(
            f"{shorten(cells[row])} is no time by {way}; {hint}.", row=row, column=column
        )
    return _microseconds(source, column, found)


def _first_days(cells: list[str]) -> list[str]:
    """Quarters and weeks of ISO 8601 as their first days, if all cells are such; else as they are.

    A week that its year does not have stays as it is, and is refused like any other text.
    """
    if all(quarters := [QUARTER.match(cell) for cell in cells]):
        return [f"{m[1]}-{3 * int(m[2]) - 2:02d}-01" for m in quarters if m]
    if all(weeks := [WEEK.match(cell) for cell in cells]):
        return [_monday(m) for m in weeks if m]
    return cells


def _monday(week: re.Match[str]) -> str:
    try:
        return date.fromisocalendar(int(week[1]), int(week[2]), 1).isoformat()
    except ValueError:
        return week[0]


def _microseconds(source: Source, column: str, series: Any) -> np.ndarray:
    if getattr(series.dtype, "tz", None) is not None:
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    exact = series.to_numpy()
    rounded = exact.astype("datetime64[us]")
    finer = rounded != exact
    if finer.any():
        raise source.error(
            "the time is finer than a microsecond; give it as a number.",
            row=int(np.argmax(finer)),
            column=column,
        )
    return rounded
