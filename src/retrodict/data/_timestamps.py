"""The time column: which one it is, and its cells as dates or numbers."""

import re
from collections.abc import Sequence
from datetime import date
from typing import Any

import numpy as np

from retrodict._errors import listed, optional, shorten
from retrodict.data._columns import is_missing, missing_cells, parsed
from retrodict.data._source import TIME_NAMES, Source

OFFSET = re.compile(r"(Z|[+-]\d\d(:?\d\d)?)$")
QUARTER = re.compile(r"^(\d{4})[- ]?Q([1-4])$")
MONTH = re.compile(r"^(\d{4})[- ]?M(0?[1-9]|1[0-2])$", re.IGNORECASE)
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
        [column for column in free if _holds_dates(source, column)],
    ):
        if len(candidates) > 1:
            raise source.error(
                f"which of the columns {listed(candidates)} is the time? Say so with time=..."
            )
        if candidates:
            return candidates[0]
    return source.row_index


def _holds_dates(source: Source, column: str) -> bool:
    """Whether a column holds dates, or text that begins like a date in each of its first cells."""
    series = source.frame[column]
    types = optional("pandas").api.types
    if types.is_datetime64_any_dtype(series.dtype) or str(series.dtype).startswith("period"):
        return True
    if types.is_bool_dtype(series.dtype):
        return False
    if types.is_numeric_dtype(series.dtype) or not parsed(series.iloc[:50])[1].any():
        named = any(word in str(series.name).lower() for word in DATE_WORDS)
        return named and find_code(source, str(series.name)) is not None
    cells = [str(cell).strip() for cell in series.iloc[:50].tolist() if not is_missing(cell)]
    return bool(cells) and all(
        any(form.match(cell) for form in (ISO, QUARTER, MONTH, WEEK)) for cell in cells
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
    return values.astype(np.int64) if _are_whole(values) else values


def _are_whole(values: np.ndarray) -> bool:
    return bool(np.all(values == np.round(values)) and np.all(np.abs(values) < 2**53))


CODES = {6: "%Y%m", 8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
"""Dates as whole numbers, by how many digits they have."""

LARGEST = (12, 31, 23, 59, 59)
"""The largest month, day, hour, minute and second."""

FIRST_YEAR, LAST_YEAR = 1500, 2300
"""Years of dates that are recognised in whole numbers."""

DATE_WORDS = ("date", "month", "yyyymm", "period", "quarter", "week")
"""Words in the name of a column that holds dates rather than numbers."""


def find_code(source: Source, column: str) -> str | None:
    """Return the format of dates that are written as whole numbers; None if they are numbers.

    200001 to 200912 are months if no number between 200012 and 200101 stands there, and so are
    20200131, 20200201 days: as numbers they would have gaps that no calendar has.

    Args:
        source: the table.
        column: the time column.

    Raises:
        DataError: if the numbers look like quarters or weeks, which are to be written as text.
    """
    series = source.frame[column]
    if optional("pandas").api.types.is_datetime64_any_dtype(series.dtype):
        return None
    if str(series.dtype).startswith("period") or parsed(series.iloc[:1])[1].any():
        return None
    values, wrong = parsed(series)
    if wrong.any() or not values.size or not np.all(np.isfinite(values) & (values >= 1e4)):
        return None
    if not _are_whole(values):
        return None
    numbers = np.unique(values.astype(np.int64))
    digits = len(str(numbers[0]))
    years = numbers // 10 ** (digits - 4)
    if len(str(numbers[-1])) != digits or years[0] < FIRST_YEAR or years[-1] > LAST_YEAR:
        return None
    named = any(word in column.lower() for word in DATE_WORDS)
    # Within a year months are numbers like any others, unless their name says what they are.
    certain = named or (years[0] < years[-1] and numbers.size > 2)
    if digits == 5 and certain and set(numbers % 10) <= {1, 2, 3, 4}:
        raise _as_text(source, column, numbers[0], "quarter", "{}Q{}", 10)
    if digits not in CODES or not (certain or (digits > 6 and numbers.size > 2)):
        return None
    rest = numbers % 10 ** (digits - 4)
    weeks = rest[(rest >= 1) & (rest <= 53)]
    if digits == 6 and certain and weeks.size == rest.size and weeks.max() > LARGEST[0]:
        raise _as_text(source, column, numbers[0], "week", "{}-W{:02d}", 100)
    for place in range((digits - 4) // 2):
        part = numbers // 10 ** (digits - 6 - 2 * place) % 100
        if np.any(part < (1 if place < 2 else 0)) or np.any(part > LARGEST[place]):
            return None
    found = optional("pandas").to_datetime(
        numbers.astype(str), format=CODES[digits], errors="coerce"
    )
    return None if found.isna().any() else CODES[digits]


def _as_text(source: Source, column: str, number: Any, what: str, form: str, base: int) -> Any:
    text = form.format(*divmod(int(number), base))
    return source.error(
        f"is {number} a {what}? Write it as {text}, or give a number as freq, such as freq=1, if it"
        " is one.",
        row=0,
        column=column,
    )


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
    """Quarters, months and weeks as their first days, if all cells are such; else as they are.

    A week that its year does not have stays as it is, and is refused like any other text.
    """
    if all(quarters := [QUARTER.match(cell) for cell in cells]):
        return [f"{m[1]}-{3 * int(m[2]) - 2:02d}-01" for m in quarters if m]
    if all(months := [MONTH.match(cell) for cell in cells]):
        return [f"{m[1]}-{int(m[2]):02d}-01" for m in months if m]
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
