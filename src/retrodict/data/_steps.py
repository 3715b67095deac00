"""The step between times: parsing, detection, the grid that it spans, and the next times.

Times are `datetime64[us]`, integers or floats, in increasing order and without duplicates.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from retrodict._interface import DataError, optional

MAX_INSERTED = 10
"""No rows are inserted if the table would have more than this many times its rows."""

TOLERANCE = 1e-3
"""Largest distance, in steps, of a difference of fractional times from a multiple of the step."""

MONTHS = re.compile(r"^(\d+) months?$")
DAY = np.timedelta64(1, "D").astype("timedelta64[us]")
IRREGULAR = "irregular"


@dataclass(frozen=True)
class Step:
    """The step of a regular grid of times.

    Attributes:
        kind: a `"number"`; a `"fixed"` duration; a number of calendar `"months"`; or an
            `"offset"` of pandas, such as business days.
        amount: a number, a `timedelta64[us]`, a number of months, or the alias of an offset.
    """

    kind: Literal["number", "fixed", "months", "offset"]
    amount: Any

    @property
    def name(self) -> str | int | float:
        """The step as the argument `freq` of `read`; JSON can store it."""
        if self.kind == "number":
            return self.amount.item()
        if self.kind == "months":
            return f"{self.amount} month{'s' if self.amount > 1 else ''}"
        return duration_name(self.amount) if self.kind == "fixed" else self.amount


def duration_name(duration: np.timedelta64) -> str:
    """Return a duration as pandas reads it: `7D`, `6h`, `15min`."""
    if duration % DAY == np.timedelta64(0, "us"):
        return f"{duration // DAY}D"
    pandas = optional("pandas")
    name = pandas.tseries.frequencies.to_offset(pandas.Timedelta(duration)).freqstr
    return name if name[0].isdigit() else f"1{name}"


def parse_step(freq: Any, dates: bool, owner: str) -> Step:
    """Parse the argument `freq`: a number for numeric times, an alias of pandas for dates.

    Args:
        freq: the argument.
        dates: whether times are dates.
        owner: the table, for messages.
    """

    def error(text: str) -> DataError:
        return DataError(f"{owner}: {{freq}}{text}", freq=freq)

    if isinstance(freq, bool) or not isinstance(freq, str | int | float | np.number):
        raise error(f": expected a number or a text, got {type(freq).__name__}.")
    if not isinstance(freq, str):
        if dates:
            raise error(", but the times are dates; give a text such as 'D', '6h' or '1 month'.")
        if not np.isfinite(freq) or freq <= 0:
            raise error(", but the times are numbers; give a number above 0.")
        return Step("number", np.asarray(freq))
    if not dates:
        raise error(", but the times are numbers; give a number.")
    if (match := MONTHS.match(freq)) and int(match[1]):
        return Step("months", int(match[1]))
    pandas = optional("pandas")
    try:
        offset = pandas.tseries.frequencies.to_offset(freq)
        if not isinstance(offset, pandas.offsets.Tick | pandas.offsets.Day):
            return Step("offset", offset.freqstr)
        text = offset.freqstr
        amount = pandas.Timedelta(text if text[0].isdigit() else f"1{text}").to_timedelta64()
        if amount > np.timedelta64(0, "us"):
            return Step("fixed", amount.astype("timedelta64[us]"))
    except ValueError:
        pass
    raise error(
        " is not known; give an alias of pandas such as 'D', 'W-SAT', 'MS' or '6h', or '1 month'."
    )


def find_step(times: Sequence[np.ndarray]) -> tuple[Step | None, str]:
    """Return the step of several series, or `None` and the reason.

    The step is the most common difference, if all others are whole multiples of it. Dates that keep
    their day of the month, or are all ends of months, step by calendar months; weekdays alone are
    business days.
    """
    differences = np.concatenate([np.diff(series) for series in times])
    if not differences.size:
        return None, "no series has two rows"
    if differences.dtype.kind == "m":
        step = _months(times) or Step("fixed", _most_common(differences))
        if step.kind == "fixed" and step.amount == DAY and _skips_weekends(times):
            step = Step("offset", "B")
    elif differences.dtype.kind == "i":
        step = Step("number", _most_common(differences))
    else:
        step = Step("number", _most_common_fraction(differences))
    num_rows = 0
    for series in times:
        places = positions(series, step)
        if places is None:
            return None, f"the most common step is {step.name}, and others are not multiples of it"
        num_rows += int(places[-1]) + 1
    if num_rows > MAX_INSERTED * sum(len(series) for series in times):
        return None, (
            f"with a step of {step.name} there would be {num_rows} rows, more than {MAX_INSERTED}"
            " times those of the table"
        )
    return step, ""


def positions(times: np.ndarray, step: Step) -> np.ndarray | None:
    """Return the number of each time on the grid from the first; `None` if one is not on it."""
    if step.kind == "months":
        if not _keeps_day(times):
            return None
        moved = _month(times) - _month(times[:1])
        return moved // step.amount if np.all(moved % step.amount == 0) else None
    if step.kind == "offset":
        grid = _offset_range(step, start=times[0], end=times[-1])
        places = np.searchsorted(grid, times)
        if np.any(places >= len(grid)) or not np.array_equal(grid[places], times):
            return None
        return places
    differences = np.diff(times) / step.amount
    rounded = np.round(differences)
    slack = TOLERANCE if times.dtype.kind == "f" else 0.0
    if np.any(rounded < 1) or np.any(np.abs(differences - rounded) > slack):
        return None
    return np.concatenate([[0], np.cumsum(rounded)]).astype(np.int64)


def complete(times: np.ndarray, places: np.ndarray, step: Step) -> np.ndarray:
    """Return all times of the grid; the given ones are unchanged."""
    count = int(places[-1]) + 1
    if count == len(times):
        return times
    if times.dtype.kind == "f":
        return np.interp(np.arange(count), places, times)
    return np.concatenate([times[:1], following(times[:1], step, count - 1, like=times)])


def following(
    times: np.ndarray, step: Step, count: int, *, like: np.ndarray | None = None
) -> np.ndarray:
    """Return the next `count` times; days of the month are those of `like`, or of `times`."""
    last = times[-1]
    if step.kind == "months":
        months = _month(times[-1:]) + step.amount * np.arange(1, count + 1)
        starts = months.astype("datetime64[M]").astype("datetime64[D]")
        anchor = _anchor(_calendar(times if like is None else like))
        day = np.minimum(anchor, _calendar(starts).days_in_month.to_numpy())
        return starts + (day - 1) + (last - last.astype("datetime64[D]"))
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
    """Return the centre of the most common differences, which rounding makes unequal."""
    typical = np.median(differences)
    rounded = np.round(differences / typical / TOLERANCE) * TOLERANCE
    near = _most_common(rounded) * typical
    step = np.median(differences[np.abs(differences - near) <= TOLERANCE * typical])
    # 0.1 and not 0.10000000000000009, the difference of two times.
    short = np.float64(f"{step:.9g}")
    return short if abs(short - step) <= 1e-12 * np.max(np.abs(differences)) else step


def _calendar(times: np.ndarray) -> Any:
    return optional("pandas").DatetimeIndex(times.astype("datetime64[us]"))


def _month(times: np.ndarray) -> np.ndarray:
    return times.astype("datetime64[M]").astype(np.int64)


def _anchor(calendar: Any) -> int:
    """Return the day of the month that times keep, 31 for ends of months."""
    return 31 if np.all(calendar.is_month_end) else int(calendar.day.max())


def _keeps_day(times: np.ndarray) -> bool:
    calendar, clock = _calendar(times), times - times.astype("datetime64[D]")
    due = np.minimum(_anchor(calendar), calendar.days_in_month)
    return bool(np.all(clock == clock[0]) and np.all(calendar.day == due))


def _months(times: Sequence[np.ndarray]) -> Step | None:
    """Return a step of calendar months, if all series keep their day of the month."""
    if not all(_keeps_day(series) for series in times):
        return None
    moved = np.concatenate([np.diff(_month(series)) for series in times])
    return Step("months", int(_most_common(moved))) if np.all(moved > 0) else None


def _skips_weekends(times: Sequence[np.ndarray]) -> bool:
    """Return whether two weekends or more pass without a time in any."""
    every = np.concatenate(times)
    days = every.astype("datetime64[D]")
    weeks = max((series[-1] - series[0]) // np.timedelta64(7, "D") for series in times)
    return bool(weeks >= 2 and np.all(np.is_busday(days)) and np.all(every == days))
