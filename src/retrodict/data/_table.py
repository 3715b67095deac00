"""The record of a table: series as padded arrays, with their names and times."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from retrodict._interface import Argument, DataError, listed
from retrodict.data._steps import Step, complete, following, parse_step
from retrodict.data._summary import MAX_NAMED, Summary, as_number, as_time, digest_of, written

MAX_LEADING_ROWS = 100_000
"""Rows of a large table from which a model and a family are initialised."""


class Rows(NamedTuple):
    """Rows of one series in order of time, including those inserted in gaps.

    Attributes:
        times: dates as `datetime64[us]`, or numbers.
        ys: observations, of shape `(time, obs)`, with NaN for missing entries.
        inputs: inputs, of shape `(time, input)`, or `None`.
    """

    times: np.ndarray
    ys: np.ndarray
    inputs: np.ndarray | None

    def cut(self, start: int | None, stop: int | None = None) -> "Rows":
        """Return the rows from `start` to before `stop`, as in a slice."""
        inputs = None if self.inputs is None else self.inputs[start:stop]
        return Rows(self.times[start:stop], self.ys[start:stop], inputs)

    def on_grid(self, places: np.ndarray, step: Step) -> "Rows":
        """Insert rows without observations; there must be none in a series with inputs.

        Args:
            places: the places of the rows on the grid.
            step: the step of the grid.
        """
        grid = complete(self.times, places, step)
        ys = np.full((len(grid), self.ys.shape[1]), np.nan)
        ys[places] = self.ys
        return Rows(grid, ys, self.inputs)

    def with_step(self, unit: Any = None) -> "Rows":
        """Add the time since the previous row as the first input; it is 1 in the first row.

        Args:
            unit: the time that counts as one; without it, each step is one.
        """
        lengths = np.ones((len(self.ys), 1))
        if unit is not None:
            lengths[1:, 0] = np.diff(self.times) / unit
        others = [] if self.inputs is None else [self.inputs]
        return self._replace(inputs=np.hstack([lengths, *others]))

    @classmethod
    def of_table(cls, table: Any) -> "Rows | None":
        """Return the rows of a table of one series without identifiers; `None` of any other.

        Args:
            table: a `Table`, or a `SharedTable`, of which no process holds all rows.
        """
        is_one = isinstance(table, Table) and table.series is None
        return table._rows()[0] if is_one else None


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """One or more series, as arguments of the functions of the library.

    `table.batch()` returns the arguments of a function of many series, `table.one(i)` those of a
    function of one. Units are those of the data.

    Example:
        >>> import retrodict as rd
        >>> columns = {"id": ["a", "a", "b"], "t": [0, 1, 0], "y": [1.0, 2.0, 3.0]}
        >>> table = rd.data.read(columns, series="id")
        >>> table.ys.shape, table.length.tolist(), table.names
        ((2, 2, 1), [2, 1], ('y',))
        >>> sorted(table.batch()), table.one(0)["ys"].shape
        (['inputs', 'length', 'mask', 'ys'], (2, 1))

    Attributes:
        ys: observations, of shape `(batch, time, obs)`, float64; NaN where missing.
        mask: true where an entry was observed; false in rows that do not exist.
        inputs: of shape `(batch, time, input)`, or `None`; rows that do not exist repeat the last.
        length: the number of rows of each series, of shape `(batch,)`.
        times: the times of the rows of each series; dates as `datetime64[us]`.
        names: the names of the columns of `ys`.
        series: identifiers, in increasing order; `None` for one series without identifier.
        input_names: the names of the columns of `inputs`; `step`, if requested, is the first.
        time_name: the name of the time column; `None` if the row number is the time.
        step: the step between times, as the argument `freq` of `read`; `None` if irregular.
        step_unit: the unit of the input `step`; `None` without this input.
        layout: the arguments with which `read` reads another table in the same way:
            `read(other, **table.layout)`. JSON can store it.
        kind: the type that `like` converts results to: `"array"`, `"frame"` (also for CSV and
            Parquet) or `"dataset"` (also for NetCDF).
        source: the path of the file, or the type of the object.
        notes: further changes of the rows, and ignored columns.
        inserted: the number of rows inserted in gaps.
    """

    ys: np.ndarray
    mask: np.ndarray
    inputs: np.ndarray | None
    length: np.ndarray
    times: tuple[np.ndarray, ...]
    names: tuple[str, ...]
    series: tuple[Any, ...] | None
    input_names: tuple[str, ...]
    time_name: str | None
    step: str | int | float | None
    step_unit: str | int | float | None
    layout: dict[str, Any]
    kind: str
    source: str
    notes: tuple[str, ...] = ()
    inserted: int = 0

    def __repr__(self) -> str:
        batch, rows, obs = self.ys.shape
        return f"Table({batch} series, up to {rows} rows, {obs} columns: {listed(self.names)})"

    @property
    def num_series(self) -> int:
        """The number of series."""
        return self.ys.shape[0]

    def batch(self) -> dict[str, Any]:
        """Return `ys`, `mask`, `inputs` and `length` of all series, the keywords of `fit`."""
        return {"ys": self.ys, "mask": self.mask, "inputs": self.inputs, "length": self.length}

    def one(self, series: int = 0) -> dict[str, Any]:
        """Return `ys`, `mask` and `inputs` of one series without padding.

        Args:
            series: its place in the batch.
        """
        rows = int(self.length[series])
        inputs = None if self.inputs is None else self.inputs[series, :rows]
        return {"ys": self.ys[series, :rows], "mask": self.mask[series, :rows], "inputs": inputs}

    def _rows(self) -> list[Rows]:
        """Return each series without padding."""
        ones = [self.one(i) for i in range(self.num_series)]
        pairs = zip(self.times, ones, strict=True)
        return [Rows(times, one["ys"], one["inputs"]) for times, one in pairs]

    def window(self, start: int, stop: int | None = None) -> "Table":
        """Return the rows from `start` to before `stop` of each series, as in a slice."""
        series = [rows.cut(start, stop) for rows in self._rows()]
        lengths = [len(rows.ys) for rows in series]
        if min(lengths) == 0:
            raise ValueError(
                f"window({start}, {stop}) leaves no row of a series with"
                f" {self.length[int(np.argmin(lengths))]} rows; choose rows that all series have."
            )
        notes = (*self.notes, "a window of the rows")
        return dataclasses.replace(self, **stack(series, max(lengths)), notes=notes)

    def last(self, count: int) -> "Table":
        """Return the last `count` rows of each series, or all of a shorter one."""
        if count < 1:
            raise ValueError(f"last expects a count of 1 or more, got {count}.")
        return self.window(-count, None)

    def select(self, identifiers: Sequence[Any]) -> "Table":
        """Return the series of these identifiers, in this order."""
        series = list(self.series or ())
        for identifier in identifiers:
            if identifier not in series:
                raise ValueError(f"There is no series {identifier!r}; there are {listed(series)}.")
        places = [series.index(identifier) for identifier in identifiers]
        if not places:
            raise ValueError("select expects one identifier or more, got none.")
        return self._some(places, self.ys.shape[1])

    def padded(self, pad_to: int | str) -> "Table":
        """Return the series with more padding, as `pad_to` of `read`."""
        rows = padded_length(int(self.length.max()), pad_to, self.source)
        return dataclasses.replace(self, **stack(self._rows(), rows))

    def future_times(self, count: int) -> tuple[np.ndarray, ...]:
        """Return the next `count` times of each series.

        Raises:
            ValueError: if times are irregular.
        """
        if self.step is None:
            raise DataError(
                "Irregular times cannot be continued; pass the future ones: {times}",
                times=Argument("times", hint="from data.read_times"),
            )
        if count < 1:
            raise ValueError(f"future_times expects a count of 1 or more, got {count}.")
        step = self._parsed(self.step)
        return tuple(following(times, step, count) for times in self.times)

    def check_future_times(self, times: Sequence[Any]) -> tuple[np.ndarray, ...]:
        """Check and convert the times of rows after the last, one array per series.

        They must be later and, if the table is regular, the next ones of its grid.

        Args:
            times: dates or numbers as those of the table, in increasing order.

        Raises:
            ValueError: if they do not follow the table.
        """
        if len(times) != self.num_series:
            raise ValueError(
                f"expected times for each of the {self.num_series} series, got {len(times)}."
            )
        return tuple(
            self._continuation(past, np.asarray(future))
            for past, future in zip(self.times, times, strict=True)
        )

    def _continuation(self, past: np.ndarray, future: np.ndarray) -> np.ndarray:
        """Return the future times of one series; refuse them unless they continue the past."""
        dates = past.dtype.kind == "M"
        if future.ndim != 1 or not future.size or (future.dtype.kind == "M") != dates:
            kind = "dates" if dates else "numbers"
            raise ValueError(f"future times must be one row of {kind}, like those of the table.")
        future = future.astype(past.dtype) if past.dtype.kind in "Mf" else future
        every = np.concatenate([past[-1:], future])
        if not np.all(every[1:] > every[:-1]):
            last = written(past[-1])
            raise ValueError(f"future times must increase and be later than the last, {last}.")
        if self.step is not None:
            expected = following(past, self._parsed(self.step), len(future))
            close = np.isclose(future, expected) if past.dtype.kind == "f" else future == expected
            if not np.all(close):
                raise ValueError(
                    f"the times of the table are regular with step {self.step}: the time after"
                    f" {written(past[-1])} is {written(expected[0])}; leave the times out, or give"
                    " all of them."
                )
        return future

    def future_steps(self, times: Sequence[Any]) -> np.ndarray:
        """Return the length of each step to future times, in units of `step_unit`.

        Args:
            times: the times of future rows, equally many per series.

        Returns:
            Lengths of shape `(batch, rows)`.

        Raises:
            ValueError: if the table has no input `step`, or times do not follow those of the table.
        """
        if self.step_unit is None:
            raise ValueError("The table was read without step_input and has no unit of steps.")
        future = self.check_future_times(times)
        if len({len(later) for later in future}) > 1:
            raise ValueError("Expected equally many future times per series.")
        if self.step is not None:
            return np.ones((self.num_series, len(future[0])))
        unit = self._parsed(self.step_unit).amount
        pairs = zip(self.times, future, strict=True)
        return np.stack([np.diff(later, prepend=past[-1:]) / unit for past, later in pairs])

    def _parsed(self, freq: Any) -> Step:
        return parse_step(freq, self.times[0].dtype.kind == "M", self.source)

    @functools.cached_property
    def summary(self) -> Summary:
        """The summary of all series."""
        columns = [self.ys[:, :, i][self.mask[:, :, i]] for i in range(len(self.names))]
        names = ("",) if self.series is None else self.series
        digests = [digest_of(name, self.times[i], **self.one(i)) for i, name in enumerate(names)]
        return Summary(
            series=tuple(str(name) for name in names[:MAX_NAMED]),
            num_series=self.num_series,
            num_rows=int(self.length.sum()),
            num_rows_observed=int(self.mask.any(axis=2).sum()),
            shortest=int(self.length.min()),
            longest=int(self.length.max()),
            inserted=self.inserted,
            begin=min(as_number(times[0]) for times in self.times),
            end=max(as_number(times[-1]) for times in self.times),
            num_observed=tuple(int(column.size) for column in columns),
            lowest=tuple(float(column.min()) if column.size else None for column in columns),
            highest=tuple(float(column.max()) if column.size else None for column in columns),
            digest=sum(digests) % 2**256,
            notes=self.notes,
        )

    def described(self, of: Summary | None = None) -> list[str]:
        """Return a description of the table, in lines.

        Args:
            of: the summary of a larger table of which this is a part; by default of this one.
        """
        summary = self.summary if of is None else of
        lines = [
            f"source: {self.source}",
            f"rows: {summary.num_rows}, in {summary.num_series} series",
        ]
        if self.series is not None:
            lines.append(f"series: {listed(summary.series, count=summary.num_series)}")
            if summary.num_series > 1:
                lines.append(f"rows per series: {summary.shortest} to {summary.longest}")
        name = "the row number" if self.time_name is None else f"column {self.time_name!r}"
        dates = self.times[0].dtype.kind == "M"
        begin, end = (written(as_time(time, dates)) for time in (summary.begin, summary.end))
        step = "irregular" if self.step is None else f"step {self.step}"
        lines.append(f"time: {name}, {begin} to {end}, {step}")
        columns = zip(
            self.names, summary.num_observed, summary.lowest, summary.highest, strict=True
        )
        for column, count, lowest, highest in columns:
            missing = summary.num_rows - count
            share = f"{missing} missing ({100 * missing / summary.num_rows:.1f} %)"
            span = f"{lowest:g} to {highest:g}" if count else "no values"
            lines.append(f"column {column!r}: {span}, {share if missing else 'none missing'}")
        for index, column in enumerate(self.input_names):
            is_step = self.step_unit is not None and not index
            unit = f", in units of {self.step_unit}" if is_step else ""
            lines.append(f"input {column!r}{unit}")
        rows = f"{summary.inserted} row{'s' if summary.inserted > 1 else ''} inserted in gaps"
        return [*lines, *summary.notes, *([rows] if summary.inserted else [])]

    def leading_series(self) -> "Table":
        """Return the first series, up to 100,000 rows together, and at least one.

        Their number is doubled while a column has fewer than two values in them.
        """
        count = np.searchsorted(np.cumsum(self.length), MAX_LEADING_ROWS, side="right")
        count = max(1, int(count))
        while count < self.num_series and self.mask[:count].sum(axis=(0, 1)).min() < 2:
            count *= 2
        if count >= self.num_series:
            return self
        return self._some(range(count), int(self.length[:count].max()))

    def _some(self, places: Sequence[int], rows: int) -> "Table":
        """Return the series at some places, padded to `rows` rows."""
        series = self._rows()
        names = None if self.series is None else tuple(self.series[i] for i in places)
        return dataclasses.replace(self, **stack([series[i] for i in places], rows), series=names)


def stack(series: Sequence[Rows], rows: int) -> dict[str, Any]:
    """Return the fields of a `Table` that hold arrays: series padded to `rows` rows."""
    length = np.array([len(one.ys) for one in series])
    ys = np.full((len(series), rows, series[0].ys.shape[1]), np.nan)
    for i, one in enumerate(series):
        ys[i, : length[i]] = one.ys
    # Repeat the last row instead of zeros: a step of length zero has no density.
    inputs = [
        one.inputs[np.minimum(np.arange(rows), len(one.inputs) - 1)]
        for one in series
        if one.inputs is not None
    ]
    return {
        "ys": ys,
        "mask": ~np.isnan(ys),
        "inputs": np.stack(inputs) if inputs else None,
        "length": length,
        "times": tuple(one.times for one in series),
    }


MAX_PADDED, MAX_PADDING = 1_000_000, 100
"""The largest padded length, or so many times the longest series if that is more."""


def padded_length(longest: int, pad_to: int | str | None, owner: str) -> int:
    """Return the number of rows to pad to.

    `"bucket"` is the next power of two up to 64, and the next multiple of 64 beyond, so that series
    of new lengths are rarely compiled again.
    """
    most = max(MAX_PADDED, MAX_PADDING * longest)
    if pad_to is None:
        return longest
    if pad_to == "bucket":
        return 1 << (longest - 1).bit_length() if longest <= 64 else -(-longest // 64) * 64
    if isinstance(pad_to, bool) or not isinstance(pad_to, int | np.integer):
        expected = "must be a number of rows, 'bucket' or None"
    elif not longest <= pad_to <= most:
        expected = f"must be at least {longest}, the longest series, and at most {most}"
    else:
        return int(pad_to)
    raise DataError(f"{owner}: {{pad_to}} {expected}.", pad_to=pad_to)
