"""The step between times: found or given, the grid that it spans, and what comes next.

Times are `datetime64[us]`, integers or floats, in increasing order and without duplicates.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from retrodict._errors import DataError, optional

MOST_INSERTED = 10
"""Rows are not inserted if the table would have more than so many times its rows."""

TOLERANCE = 1e-3
"""How far from a multiple of the step, in steps, a difference of fractional times may be."""

MONTHS = re.compile(r"^(\d+) months?$")
UNITS = {
    "D": 86_400_000_000,
    "h": 3_600_000_000,
    "min": 60_000_000,
    "s": 1_000_000,
    "ms": 1000,
    "us": 1,
}
"""Microseconds in each unit."""
DAY = np.timedelta64(1, "D").astype("timedelta64[us]")


@dataclass(frozen=True)
class Step:
    """The step of a regular grid of times.

    Attributes:
        kind: a `"number"`; a `"fixed"` stretch of time; a number of calendar `"months"`; or an
            `"offset"` of pandas, such as business days.
        amount: a number, a `timedelta64[us]`, a number of months, or the alias of an offset.
    """

    kind: Literal["number", "fixed", "months", "offset"]
    amount: Any

    @property
    def name(self) -> str | int | float:
        """What `read` takes as `freq`, and JSON can store."""
        if self.kind == "number":
            return self.amount.item()
        if self.kind == "months":
            return f"{self.amount} month{'s' if self.amount > 1 else ''}"
        if self.kind == "fixed":
            return name_of_stretch(self.amount)
        return self.amount


def name_of_stretch(stretch: np.timedelta64) -> str:
    """A stretch of time as pandas reads it: `7D`, `6h`, `15min`."""
    ticks = int(stretch.astype("timedelta64[us]").astype(np.int64))
    unit = next(unit for unit, size in UNITS.items() if ticks % size == 0)
    return f"{ticks // UNITS[unit]}{unit}"


def parse_step(freq: Any, dates: bool, owner: str) -> Step:
    """A step as the user gives it: a number for numeric times, an alias of pandas for dates."""
    if isinstance(freq, bool) or not isinstance(freq, str | int | float | np.number):
        raise DataError(f"{owner}: freq: expected a number or a text, got {type(freq).__name__}.")
    if not isinstance(freq, str):
        if dates or not np.isfinite(freq) or freq <= 0:
            raise DataError(
                f"{owner}: freq={freq!r} does not fit times that are "
                + (
                    "dates; give a text such as 'D', '6h' or '1 month'."
                    if dates
                    else "numbers; give one above 0."
                )
            )
        return Step("number", np.asarray(freq))
    if not dates:
        raise DataError(f"{owner}: freq={freq!r}, but the times are numbers; give a number.")
    if (match := MONTHS.match(freq)) and int(match[1]):
        return Step("months", int(match[1]))
    pandas = optional("pandas")
    try:
        offset = pandas.tseries.frequencies.to_offset(freq)
        if not isinstance(offset, pandas.offsets.Tick | pandas.offsets.Day):
            return Step("offset", offset.freqstr)
        text = offset.freqstr
        stretch = pandas.Timedelta(text if text[0].isdigit() else f"1{text}")
        amount = stretch.to_timedelta64().astype("timedelta64[us]")
        if amount > np.timedelta64(0, "us"):
            return Step("fixed", amount)
    except ValueError:
        pass
    raise DataError(
        f"{owner}: freq={freq!r} is not known; give an alias of pandas such as 'D', 'W-SAT', 'MS'"
        " or '6h', or '1 month'."
    )


def find_step(times: Sequence[np.ndarray]) -> tuple[Step | None, str]:
    """The step of several series, or `None` and why there is none.

    It is the most common difference, if all others are whole multiples of it. Dates that keep their
    day of the month, or are all ends of months, step by calendar months; days of which none is a
    weekend are business days.
    """
    differences = np.concatenate([np.diff(series) for series in times])
    if not differences.size:
        return None, "no series has two rows"
    if differences.dtype.kind == "m":
        if step := _months(times):
            return _guarded(step, times)
        step = Step("fixed", _most_common(differences))
        if step.amount == DAY and _spares_weekends(times):
            step = Step("offset", "B")
    elif differences.dtype.kind == "i":
        step = Step("number", _most_common(differences))
    else:
        step = Step("number", _most_common_fraction(differences))
    return _guarded(step, times)


def _guarded(step: Step, times: Sequence[np.ndarray]) -> tuple[Step | None, str]:
    found = [positions(series, step) for series in times]
    if any(places is None for places in found):
        return None, f"the most common step is {step.name}, and others are no multiples of it"
    grown = sum(int(places[-1]) + 1 for places in found if places is not None)
    if grown > MOST_INSERTED * sum(len(series) for series in times):
        return None, (
            f"with a step of {step.name} there would be {grown} rows, more than {MOST_INSERTED}"
            " times those of the table"
        )
    return step, ""


def positions(times: np.ndarray, step: Step) -> np.ndarray | None:
    """The number of each time on the grid that begins at the first; `None` if one is not on it."""
    if step.kind == "months":
        if not _keeps_day(times):
            return None
        months = _month(times)
        whole = (months - months[0]) // step.amount
        return whole if np.all(whole * step.amount == months - months[0]) else None
    if step.kind == "offset":
        grid = _offset_range(step, start=times[0], end=times[-1])
        places = np.searchsorted(grid, times)
        inside = places < len(grid)
        if not inside.all() or not np.array_equal(grid[places], times):
            return None
        return places
    differences = np.diff(times) / step.amount
    whole = np.round(differences)
    slack = TOLERANCE if times.dtype.kind == "f" else 0.0
    if np.any(whole < 1) or np.any(np.abs(differences - whole) > slack):
        return None
    return np.concatenate([[0], np.cumsum(whole)]).astype(np.int64)


def complete(times: np.ndarray, places: np.ndarray, step: Step) -> np.ndarray:
    """All times of the grid, those that are given as they are."""
    count = int(places[-1]) + 1
    if count == len(times):
        return times
    if times.dtype.kind == "f":
        return np.interp(np.arange(count), places, times)
    return np.concatenate([times[:1], following(times[:1], step, count - 1, like=times)])


def following(
    times: np.ndarray, step: Step, count: int, *, like: np.ndarray | None = None
) -> np.ndarray:
    """The next `count` times after the last one; days of the month as in `like`."""
    last = times[-1]
    if step.kind == "months":
        return _shifted(
            last, step.amount * np.arange(1, count + 1), times if like is None else like
        )
    if step.kind == "offset":
        return _offset_range(step, start=last, periods=count + 1)[1:]
    return last + step.amount * np.arange(1, count + 1)


def _offset_range(step: Step, **bounds: Any) -> np.ndarray:
    pandas = optional("pandas")
    return pandas.date_range(freq=step.amount, **bounds).to_numpy().astype("datetime64[us]")


def _most_common(differences: np.ndarray) -> Any:
    values, counts = np.unique(differences, return_counts=True)
    return values[np.argmax(counts)]


def _most_common_fraction(differences: np.ndarray) -> Any:
    """The centre of the most common differences, which rounding makes unequal."""
    typical = np.median(differences)
    rounded = np.round(differences / typical / TOLERANCE) * TOLERANCE
    near = _most_common(rounded) * typical
    step = np.median(differences[np.abs(differences - near) <= TOLERANCE * typical])
    # 0.1 and not 0.10000000000000009, which is what a difference of two times is.
    short = np.float64(f"{step:.9g}")
    return short if abs(short - step) <= 1e-12 * np.max(np.abs(differences)) else step


def _month(times: np.ndarray) -> np.ndarray:
    return times.astype("datetime64[M]").astype(np.int64)


def _day(times: np.ndarray) -> np.ndarray:
    start = times.astype("datetime64[M]").astype("datetime64[D]")
    return (times.astype("datetime64[D]") - start).astype(np.int64) + 1


def _days_in(months: np.ndarray) -> np.ndarray:
    first = months.astype("datetime64[M]").astype("datetime64[D]")
    return ((months + 1).astype("datetime64[M]").astype("datetime64[D]") - first).astype(np.int64)


def _anchor(times: np.ndarray) -> int:
    """The day of the month that times keep, 31 for ends of months."""
    day = _day(times)
    at_end = np.all(day == _days_in(_month(times)))
    return 31 if at_end else int(day.max())


def _keeps_day(times: np.ndarray) -> bool:
    clock = times - times.astype("datetime64[D]")
    due = np.minimum(_anchor(times), _days_in(_month(times)))
    return bool(np.all(clock == clock[0]) and np.all(_day(times) == due))


def _shifted(last: Any, months: np.ndarray, times: np.ndarray) -> np.ndarray:
    """A time moved by months, on the day of the month that `times` keep."""
    clock = last - last.astype("datetime64[D]")
    due = _month(last[None])[0] + months
    day = np.minimum(_anchor(times), _days_in(due))
    return due.astype("datetime64[M]").astype("datetime64[D]") + (day - 1) + clock


def _months(times: Sequence[np.ndarray]) -> Step | None:
    """A step of calendar months, if all series keep their day of the month."""
    if not all(_keeps_day(series) for series in times):
        return None
    moved = np.concatenate([np.diff(_month(series)) for series in times])
    return Step("months", int(_most_common(moved))) if np.all(moved > 0) else None


def _spares_weekends(times: Sequence[np.ndarray]) -> bool:
    """Whether two weekends or more are passed without a single time in them."""
    days = np.concatenate(times).astype("datetime64[D]")
    if not np.all(np.is_busday(days)):
        return False
    spans = [(series[0], series[-1]) for series in times]
    passed = [(last - first) // np.timedelta64(7, "D") for first, last in spans]
    return bool(max(passed) >= 2 and np.all(np.concatenate(times) == days))
