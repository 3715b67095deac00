"""The content of a report as plain arrays and strings, without models or JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

Verdict = Literal["good", "doubtful", "bad", "unknown"]


@dataclass(frozen=True)
class Hollow:
    """The gap in a band between two modes, which contains hardly any draws.

    Attributes:
        lower: `(time,)`, its lower end; NaN in rows with one mode.
        upper: `(time,)`, its upper end.
    """

    lower: np.ndarray
    upper: np.ndarray


@dataclass(frozen=True)
class Band:
    """A band around a line over time.

    Attributes:
        times: `(time,)`, dates (`datetime64`) or numbers, increasing.
        centre: `(time,)`, a mean or a median.
        lower: `(time,)`, the lower end of the band.
        upper: `(time,)`, the upper end of the band.
        hollow: the gap between two modes, or None.
    """

    times: np.ndarray
    centre: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    hollow: Hollow | None = None

    def __post_init__(self):
        _check_times(self.times)
        for name in ("centre", "lower", "upper"):
            _check_length(name, getattr(self, name), self.times)

    @staticmethod
    def of_draws(times: np.ndarray, draws: np.ndarray, level: float) -> "Band":
        """Return the band between quantiles of draws, around their median.

        Args:
            times: `(time,)`.
            draws: `(sample, time)`.
            level: the probability within the band.
        """
        ends = (0.5 - level / 2, 0.5, 0.5 + level / 2)
        lower, centre, upper = np.quantile(draws, ends, axis=0)
        hollow = find_hollow(draws, lower, upper)
        if hollow is not None:
            # Between modes of about equal weight the median is arbitrary.
            share = np.mean(draws < hollow.lower, axis=0)
            balanced = ~np.isnan(hollow.lower) & (np.abs(share - 0.5) < 1 / 6)
            centre = np.where(balanced, np.nan, centre)
        return Band(times, centre, lower, upper, hollow)


@dataclass(frozen=True)
class Shade:
    """The probabilities of regimes over time, which shade a panel.

    Attributes:
        times: `(time,)`, those of the rows and of a forecast.
        probabilities: `(time, regime)`.
    """

    times: np.ndarray
    probabilities: np.ndarray

    def __post_init__(self):
        _check_times(self.times)
        _check_length("probabilities", self.probabilities[:, 0], self.times)

    @property
    def most_probable(self) -> np.ndarray:
        """The index of the most probable regime of each row."""
        return np.argmax(self.probabilities, axis=1)

    @property
    def strength(self) -> np.ndarray:
        """How far the most probable regime is ahead of a tie: 0 for equal odds, 1 if certain."""
        count = self.probabilities.shape[1]
        best = self.probabilities.max(axis=1)
        return np.ones_like(best) if count == 1 else (best - 1 / count) / (1 - 1 / count)


@dataclass(frozen=True)
class Panel:
    """One observed column or one state of a series.

    Attributes:
        title: the name of the column or of the state.
        smoothed: the band of the rows; its centre is NaN where there is none.
        observed: `(time,)`, the observations, NaN where missing; None for a state.
        forecast: the band after the last row, or None.
        regimes: the probabilities of regimes, or None.
    """

    title: str
    smoothed: Band
    observed: np.ndarray | None = None
    forecast: Band | None = None
    regimes: Shade | None = None

    def __post_init__(self):
        times = self.smoothed.times
        _check_length("observed", self.observed, times)
        if self.forecast is not None and is_dated(self.forecast.times) != is_dated(times):
            raise ValueError(
                f"The times of a panel and of its forecast must both be dates or both be numbers; "
                f"those of {self.title!r} are {times.dtype} and {self.forecast.times.dtype}."
            )

    def gaps(self) -> np.ndarray:
        """Return the rows at which an observation is missing."""
        return np.flatnonzero(np.isnan(self.observed if self.observed is not None else []))


@dataclass(frozen=True)
class PlottedSeries:
    """The panels of one series, which share a time axis.

    Attributes:
        name: its identifier.
        panels: one per observed column and per state, in order.
    """

    name: str
    panels: Sequence[Panel]

    def __post_init__(self):
        if not self.panels:
            raise ValueError(f"The series {self.name!r} has no panels; give at least one.")
        if len({is_dated(panel.smoothed.times) for panel in self.panels}) > 1:
            raise ValueError(
                f"The panels of a series share an axis; those of {self.name!r} have dates and "
                "numbers as times. Give one of the two."
            )


@dataclass(frozen=True)
class ParameterLine:
    """One parameter, on its natural scale.

    Attributes:
        name: its name.
        estimate: its value.
        error: its standard error, None if unavailable.
        interval: the ends of its interval, None if unavailable or not finite.
        learned: whether it was learned; false if it was fixed.
        note: the text in place of an unavailable interval.
    """

    name: str
    estimate: float
    error: float | None = None
    interval: tuple[float | None, float | None] | None = None
    learned: bool = True
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """A training curve.

    Attributes:
        name: the data it was evaluated on, such as "training".
        steps: `(time,)`, the number of the step.
        values: `(time,)`, the objective.
    """

    name: str
    steps: np.ndarray
    values: np.ndarray

    def __post_init__(self):
        _check_length("values", self.values, self.steps, "steps")


class Finding(NamedTuple):
    """The result of one check of a run.

    Attributes:
        name: the name of the check.
        value: its result in words.
        meaning: the interpretation, in a sentence.
        verdict: `"good"`, `"doubtful"` or `"bad"`; `"unknown"` if the check could not be made.
        numbers: the result as numbers by name; the verdict depends on `"value"`.
    """

    name: str
    value: str
    meaning: str
    verdict: Verdict
    numbers: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class ReportContent:
    """The content of the report of a run.

    Attributes:
        title: the heading.
        verdict: "good", "doubtful" or "bad", or None if no check could be made.
        summary: the results, one text per paragraph.
        data: the description of the data, one text per line.
        series: the series; a page shows the first `MAX_SERIES` of them.
        level: the probability within the bands and the intervals.
        band: the description of the bands, in a sentence.
        centre: the lines within the bands: "mean" or "median".
        parameters: the parameters of the model.
        parameters_method: how their uncertainty was computed.
        training: the training curves; empty if nothing was trained.
        training_label: the quantity and unit of the curves.
        diagnostics: the checks.
        commands: command lines that reproduce the run.
        facts: versions, seeds and hashes of data, as pairs of name and value.
    """

    title: str
    verdict: Verdict | None
    summary: Sequence[str]
    data: Sequence[str]
    series: Sequence[PlottedSeries]
    level: float = 0.9
    band: str = ""
    centre: Literal["mean", "median"] = "mean"
    parameters: Sequence[ParameterLine] = ()
    parameters_method: str = ""
    training: Sequence[Curve] = ()
    training_label: str = ""
    diagnostics: Sequence[Finding] = ()
    commands: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()

    def __post_init__(self):
        if not 0 < self.level < 1:
            raise ValueError(f"`level` must be between 0 and 1, such as 0.9, got {self.level}.")


SHALLOW = 0.4
"""A valley is a gap if its density is below this share of the lower of the two adjacent peaks."""

MIN_IN_WINDOW, WINDOWS = 50, 20
"""Draws per density estimate: one in `WINDOWS`, and at least this many."""


def find_hollow(draws: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> Hollow | None:
    """Return where draws leave a gap between two modes; None if all rows have one mode.

    The density at a draw is the inverse of the distance between its neighbours on both sides, half
    a window away. A valley counts if the density in it is below `SHALLOW` times both that of a peak
    before it and that of a peak after it. Counts, many of which are equal, have no gap.

    Args:
        draws: `(sample, time)`.
        lower: `(time,)`, the lower end of the band.
        upper: `(time,)`, the upper end of the band; the gap is within.
    """
    half = max(MIN_IN_WINDOW, draws.shape[0] // WINDOWS) // 2
    if draws.shape[0] < 6 * half or not np.all(np.isfinite(draws)):
        return None
    ordered = np.sort(draws, axis=0)
    width = ordered[2 * half :] - ordered[: -2 * half]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        density = 1 / width
        before = np.maximum.accumulate(density, axis=0)
        after = np.maximum.accumulate(density[::-1], axis=0)[::-1]
        depth = density / np.minimum(before, after)
    columns = np.arange(draws.shape[1])
    deepest = np.argmin(np.where(np.isnan(depth), 1.0, depth), axis=0)
    # All windows over a gap after draw g have low densities: those that begin at g − 2 half + 1
    # to g. A valley that is not empty has more such windows, and is between the same two draws.
    rank = np.arange(len(density))[:, None]
    high = density >= SHALLOW * np.minimum(before, after)[deepest, columns]
    first = np.max(np.where(high & (rank < deepest), rank, -1), axis=0) + 1
    last = np.min(np.where(high & (rank > deepest), rank, len(density)), axis=0) - 1
    middle = (first + last) // 2 + half
    begin = ordered[np.minimum(first + 2 * half - 1, middle), columns]
    end = ordered[np.maximum(last + 1, middle + 1), columns]
    has_gap = (depth[deepest, columns] < SHALLOW) & (width.min(axis=0) > 0)
    has_gap &= (begin > lower) & (end < upper)
    if not has_gap.any():
        return None
    return Hollow(np.where(has_gap, begin, np.nan), np.where(has_gap, end, np.nan))


def is_dated(times: np.ndarray) -> bool:
    """Return whether times are dates rather than numbers."""
    return times.dtype.kind == "M"


def milliseconds(times: np.ndarray) -> np.ndarray:
    """Return dates as milliseconds since 1970, and other times unchanged."""
    return times.astype("datetime64[us]").astype(np.int64) / 1000 if is_dated(times) else times


def percent(level: float) -> str:
    """Return a probability as a percentage: 0.9 is "90%"."""
    return f"{100 * level:g}%"


def _check_times(times: np.ndarray) -> None:
    if times.ndim != 1 or times.dtype.kind not in "Miuf":
        raise ValueError(
            "`times` must be a vector of dates (datetime64) or numbers, got shape "
            f"{times.shape} and type {times.dtype}."
        )
    if not (np.isfinite(times).all() and np.all(times[1:] > times[:-1])):
        raise ValueError("`times` must be increasing, without NaN or NaT; sort them first.")


def _check_length(
    name: str, values: np.ndarray | None, of: np.ndarray, owner: str = "times"
) -> None:
    if values is not None and np.shape(values) != (len(of),):
        raise ValueError(
            f"`{name}` must have one value per entry of `{owner}`, shape ({len(of)},), got"
            f" {np.shape(values)}."
        )
