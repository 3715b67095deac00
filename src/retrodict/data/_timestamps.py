"""The time column: its name, and its cells as dates or numbers."""

import re
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import numpy as np

from retrodict._interface import listed, optional, shorten
from retrodict.data._source import TIME_NAMES, Source, missing_cells, parse_numbers

OFFSET = re.compile(r"(Z|[+-]\d\d(:?\d\d)?)$")
ISO = re.compile(r"^\d{4}-\d\d")
PERIODS = {
    re.compile(r"^(\d{4})[- ]?Q([1-4])$"): lambda year, quarter: date(year, 3 * quarter - 2, 1),
    re.compile(r"(?i)^(\d{4})[- ]?M(0?[1-9]|1[0-2])$"): lambda year, month: date(year, month, 1),
    re.compile(r"^(\d{4})[- ]?W(\d\d)$"): lambda year, week: date.fromisocalendar(year, week, 1),
}
"""Quarters, months and weeks as text, with functions that return their first days."""

CODES = {6: "%Y%m", 8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
"""Formats of dates that are written as whole numbers, by the number of digits."""

FIRST_YEAR, LAST_YEAR = 1500, 2300
"""Years of dates that are recognised in whole numbers."""

DATE_WORDS = ("date", "month", "yyyymm", "period", "quarter", "week")
"""Words in the name of a column that holds dates rather than numbers."""


def find_time(source: Source, time: str | None, taken: Sequence[str]) -> str | None:
    """Return the name of the time column; `None` if the row number is the time.

    Args:
        source: the table.
        time: the name that the user passed, if any.
        taken: columns that have another role.

    Raises:
        DataError: if there is no such column, or if there are several candidates.
    """
    if time is not None:
        source.require([time], "time")
        return time
    if source.time_index is not None:
        return source.time_index
    free = [column for column in source.frame.columns if column not in taken]
    for candidates in (
        [column for column in free if column.lower() in TIME_NAMES],
        [column for column in free if _holds_dates(source, column)],
    ):
        if len(candidates) > 1:
            raise source.error(
                f"each of the columns {listed(candidates)} may be the time; name it with {{time}}",
                time=...,
            )
        if candidates:
            return candidates[0]
    return source.row_index


def _is_dates(series: Any) -> bool:
    """Return whether a pandas series has a type of dates or periods."""
    pandas = optional("pandas")
    is_period = isinstance(series.dtype, pandas.PeriodDtype)
    return is_period or pandas.api.types.is_datetime64_any_dtype(series.dtype)


def _holds_dates(source: Source, column: str) -> bool:
    """Return whether a column holds dates, or text whose first cells begin like dates."""
    series = source.frame[column]
    if _is_dates(series):
        return True
    if optional("pandas").api.types.is_bool_dtype(series.dtype):
        return False
    head = series.iloc[:50]
    if not parse_numbers(head)[1].any():
        return _is_named_like_dates(column) and find_code(source, column) is not None
    cells = [str(cell).strip() for cell in head[~missing_cells(head)]]
    return bool(cells) and all(any(form.match(c) for form in (ISO, *PERIODS)) for c in cells)


def _is_named_like_dates(column: str) -> bool:
    return any(word in column.lower() for word in DATE_WORDS)


def timestamps(source: Source, column: str, time_format: str | None) -> np.ndarray:
    """Return a time column as `datetime64[us]`, integers or float64.

    Dates are parsed as ISO 8601 or with the given format and never guessed: 03/04/2020 is
    ambiguous. Times with an offset are converted to UTC.

    Raises:
        DataError: if a cell is missing or cannot be parsed, with its row.
    """
    series = source.frame[column]
    remedy = "fill it in or remove the row."
    source.refuse(missing_cells(series), column, f"the time is missing; {remedy}")
    if _is_dates(series):
        if isinstance(series.dtype, optional("pandas").PeriodDtype):
            series = series.dt.to_timestamp()
        return _microseconds(source, column, series)
    if time_format is None:
        values, invalid = parse_numbers(series)
        if not invalid.any():
            source.refuse(~np.isfinite(values), column, "the time is infinite; correct it.")
            return values.astype(np.int64) if _are_whole(values) else values
    cells = [str(int(c)) if _is_whole(c) else str(c).strip() for c in series.tolist()]
    if time_format in CODES.values():  # text such as 200001.0
        cells = [cell.removesuffix(".0") for cell in cells]
    return _parse_dates(source, column, cells, time_format)


def kind_of_times(source: Source, column: str) -> str:
    """Return the kind of the times of a column by its first cell, in words.

    Args:
        source: a table whose time column `timestamps` can parse.
        column: the time column.
    """
    cells = source.frame[column].iloc[:1]
    if not parse_numbers(cells)[1].any():
        return "numbers"
    (cell,) = cells.tolist()
    zoned = getattr(cell, "tzinfo", None) is not None or OFFSET.search(str(cell).strip()[10:])
    return "dates with an offset from UTC" if zoned else "dates"


def _is_whole(cell: Any) -> bool:
    return isinstance(cell, float | np.floating) and float(cell).is_integer()


def _are_whole(values: np.ndarray) -> bool:
    return bool(np.all(values == np.round(values)) and np.all(np.abs(values) < 2**53))


def find_code(source: Source, column: str) -> str | None:
    """Return the format of dates that are written as whole numbers; `None` for other times.

    200001, ..., 200912 are months if none of them is between 200012 and 200101; 20200131, 20200201
    are days. As plain numbers they would have gaps that no calendar has.

    Args:
        source: the table.
        column: the time column.

    Raises:
        DataError: if the numbers look like quarters or weeks, which must be written as text.
    """
    series = source.frame[column]
    if _is_dates(series) or parse_numbers(series.iloc[:1])[1].any():
        return None
    values, invalid = parse_numbers(series)
    if invalid.any() or not values.size or not np.all(np.isfinite(values) & (values >= 1e4)):
        return None
    if not _are_whole(values):
        return None
    codes = np.unique(values.astype(np.int64))
    digits = len(str(codes[0]))
    years, rest = np.divmod(codes, 10 ** (digits - 4))
    if len(str(codes[-1])) != digits or years[0] < FIRST_YEAR or years[-1] > LAST_YEAR:
        return None
    # Months of one year are read as plain numbers, unless the name of the column indicates dates.
    certain = _is_named_like_dates(column) or (years[0] < years[-1] and codes.size > 2)
    if digits == 5 and certain and np.all((rest >= 1) & (rest <= 4)):
        raise _write_as_text(source, column, codes[0], "quarter", f"{years[0]}Q{rest[0]}")
    if digits not in CODES or not (certain or (digits > 6 and codes.size > 2)):
        return None
    if digits == 6 and certain and rest.min() >= 1 and 12 < rest.max() <= 53:
        raise _write_as_text(source, column, codes[0], "week", f"{years[0]}-W{rest[0]:02d}")
    dates = optional("pandas").to_datetime(codes.astype(str), format=CODES[digits], errors="coerce")
    return None if dates.isna().any() else CODES[digits]


def _write_as_text(source: Source, column: str, code: Any, what: str, text: str) -> Exception:
    return source.error(
        f"is {code} a {what}? Write it as {text}; if it is a number, give a number as step, such"
        f" as {{freq}}.",
        freq=1,
        row=0,
        column=column,
    )


def _parse_dates(
    source: Source, column: str, cells: list[str], time_format: str | None
) -> np.ndarray:
    pandas = optional("pandas")
    if time_format is None:
        cells = _first_days(cells)
        offsets = np.array([bool(OFFSET.search(cell[10:])) for cell in cells], bool)
        text = "some times have an offset from UTC and some have none; write all in one way."
        source.refuse(offsets.any() & ~offsets, column, text)
    texts = pandas.Series(cells, dtype=object)
    form = time_format or "ISO8601"
    try:
        dates = pandas.to_datetime(texts, format=form, errors="coerce", utc=True)
    except ValueError as error:
        raise source.error(
            f"{{time_format}} is not a format of dates ({error}); write e.g. '%d/%m/%Y'.",
            time_format=time_format,
            column=column,
        ) from None
    invalid = dates.isna().to_numpy()
    if invalid.any():
        row = int(np.argmax(invalid))
        form = "ISO 8601 (2020-12-31)" if time_format is None else f"the format {time_format!r}"
        raise source.error(
            f"{shorten(cells[row])} is not a time in {form}; correct it, or give the format, such"
            f" as {{time_format}}.",
            time_format="%d/%m/%Y",
            row=row,
            column=column,
        )
    return _microseconds(source, column, dates)


def _first_days(cells: list[str]) -> list[str]:
    """Return quarters, months and weeks as their first days, if all cells are of one kind.

    A week that does not exist stays as it is, and is refused like any other text.
    """
    for form, first_day in PERIODS.items():
        matches = [match for cell in cells if (match := form.match(cell))]
        if len(matches) == len(cells):
            return [_first_day(first_day, match) for match in matches]
    return cells


def _first_day(first_day: Callable[[int, int], date], match: re.Match[str]) -> str:
    try:
        return first_day(int(match[1]), int(match[2])).isoformat()
    except ValueError:
        return match[0]


def _microseconds(source: Source, column: str, series: Any) -> np.ndarray:
    if getattr(series.dtype, "tz", None) is not None:
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    exact = series.to_numpy()
    rounded = exact.astype("datetime64[us]")
    text = "the time is finer than a microsecond; give it as a number."
    source.refuse(rounded != exact, column, text)
    return rounded
