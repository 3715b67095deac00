"""The record of a table that was read: series as padded arrays, and all that names them."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrodict._errors import DataError, listed
from retrodict.data._steps import Step, following, parse_step
from retrodict.data._summary import MOST_NAMED, Summary, as_number, as_time, digest_of, written

MOST_LEADING_ROWS = 100_000
"""How many rows of a large table say what a model and a family are to start from."""


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """One or more series, ready for every verb of the library.

    `table.batch()` holds the arguments of a verb that takes many series, `table.one(i)` those of a
    verb that takes one. Units are those of the data.

    Attributes:
        ys: observations, of shape `(batch, time, obs)`, float64; NaN where there is none.
        mask: true where an entry was seen; false in rows that do not exist.
        inputs: of shape `(batch, time, input)`, or `None`; rows that do not exist repeat the last.
        length: how many rows of each series exist, of shape `(batch,)`.
        times: the times of each series, as many as it has rows; dates as `datetime64[us]`.
        names: of the columns of `ys`.
        series: identifiers, in increasing order; `None` if the table is one series without one.
        input_names: of the columns of `inputs`; `step`, if it was asked for, is the first.
        time_name: of the time column; `None` if the row number is the time.
        step: between times, as `read` takes it by `freq`; `None` if they are irregular.
        step_unit: the stretch of time that counts as 1 in the input `step`; `None` without one.
        layout: what `read` is to be told so that another table is read in the same way, as
            `read(other, **table.layout)`. JSON can store it.
        kind: what it was read from, which `like` turns results into: `"array"`, `"frame"` (CSV and
            Parquet too) or `"dataset"` (NetCDF too).
        source: the file as it was given, or the type of the object.
        notes: what else was done to the rows, and what was left aside.
        inserted: how many rows were inserted in gaps.
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
        """How many series there are."""
        return self.ys.shape[0]

    def batch(self) -> dict[str, Any]:
        """`ys`, `mask`, `inputs` and `length` of all series, as keywords of `fit` or `smooth`."""
        return {"ys": self.ys, "mask": self.mask, "inputs": self.inputs, "length": self.length}

    def one(self, series: int = 0) -> dict[str, Any]:
        """`ys`, `mask` and `inputs` of one series without padding, as keywords of most verbs.

        Args:
            series: its place in the batch.
        """
        rows = int(self.length[series])
        inputs = None if self.inputs is None else self.inputs[series, :rows]
        return {"ys": self.ys[series, :rows], "mask": self.mask[series, :rows], "inputs": inputs}

    def window(self, start: int, stop: int | None = None) -> "Table":
        """The rows from `start` to before `stop` of each series, counted as in a slice."""
        parts = [slice(start, stop).indices(int(rows))[:2] for rows in self.length]
        kept = [max(last - first, 0) for first, last in parts]
        if min(kept) == 0:
            raise ValueError(
                f"window({start}, {stop}) leaves no row of a series with"
                f" {self.length[int(np.argmin(kept))]} rows; choose rows that all series have."
            )
        pieces = [
            Piece(
                self.times[i][first:last],
                self.ys[i, first:last],
                None if self.inputs is None else self.inputs[i, first:last],
            )
            for i, (first, last) in enumerate(parts)
        ]
        arrays = stack(pieces, max(kept))
        return dataclasses.replace(self, **arrays, notes=(*self.notes, "a window of the rows"))

    def last(self, count: int) -> "Table":
        """The last `count` rows of each series, or all of a shorter one."""
        if count < 1:
            raise ValueError(f"last expects a count of 1 or more, got {count}.")
        return self.window(-count, None)

    def select(self, identifiers: Sequence[Any]) -> "Table":
        """The series of these identifiers, in this order."""
        known = list(self.series or ())
        for identifier in identifiers:
            if identifier not in known:
                raise ValueError(f"There is no series {identifier!r}; there are {listed(known)}.")
        places = [known.index(identifier) for identifier in identifiers]
        if not places:
            raise ValueError("select expects one identifier or more, got none.")
        return self._some(np.array(places))

    def padded(self, pad_to: int | str) -> "Table":
        """The same series with more rows that do not exist, as `pad_to` of `read`."""
        rows = padded_length(int(self.length.max()), pad_to, self.source)
        pieces = []
        for i in range(self.num_series):
            one = self.one(i)
            pieces.append(Piece(self.times[i], one["ys"], one["inputs"]))
        return dataclasses.replace(self, **stack(pieces, rows))

    def future_times(self, count: int) -> tuple[np.ndarray, ...]:
        """The next `count` times of each series.

        Raises:
            ValueError: if times are irregular, so that there is no next one.
        """
        if self.step is None:
            raise ValueError(
                "Irregular times have no next one. Give the coming ones: times=... from read_times."
            )
        if count < 1:
            raise ValueError(f"future_times expects a count of 1 or more, got {count}.")
        step = self._step()
        return tuple(following(times, step, count) for times in self.times)

    def coming(self, times: Sequence[Any]) -> tuple[np.ndarray, ...]:
        """The times of rows after the last, one array a series, refused unless they follow it.

        They are to be later and, if the table is regular, the next ones of its grid.

        Args:
            times: dates or numbers as those of the table, in increasing order.

        Raises:
            ValueError: if they do not follow the table.
        """
        if len(times) != self.num_series:
            raise ValueError(
                f"there must be times for each of the {self.num_series} series, got {len(times)}."
            )
        found = []
        for own, given in zip(self.times, times, strict=True):
            later = np.asarray(given)
            dates = own.dtype.kind == "M"
            if later.ndim != 1 or not later.size or (later.dtype.kind == "M") != dates:
                kind = "dates" if dates else "numbers"
                raise ValueError(f"coming times must be one row of {kind}, as the table has them.")
            later = later.astype(own.dtype) if own.dtype.kind in "Mf" else later
            steps = np.diff(np.concatenate([own[-1:], later]))
            if not np.all(steps > np.zeros((), steps.dtype)):
                last = written(own[-1])
                raise ValueError(f"coming times must increase and be later than the last, {last}.")
            if self.step is not None:
                expected = following(own, self._step(), len(later))
                close = later == expected if own.dtype.kind != "f" else np.isclose(later, expected)
                if not np.all(close):
                    raise ValueError(
                        f"the times of the table are regular and go on by {self.step}: after"
                        f" {written(own[-1])} comes {written(expected[0])}; leave them out, or give"
                        " all of them up to the last that is wanted."
                    )
            found.append(later)
        return tuple(found)

    def steps_to(self, times: Sequence[Any]) -> np.ndarray:
        """The length of each step to coming times in units of `step_unit`, as `read` counts them.

        Args:
            times: those of the coming rows, equally many of each series.

        Returns:
            Lengths of shape `(batch, rows)`.

        Raises:
            ValueError: if the table has no input `step`, or times do not follow it.
        """
        if self.step_unit is None:
            raise ValueError("The table was read without step_input, and has no unit of steps.")
        coming = self.coming(times)
        if len({len(later) for later in coming}) > 1:
            raise ValueError("There must be equally many coming times of each series.")
        if self.step is not None:
            return np.ones((self.num_series, len(coming[0])))
        unit = parse_step(self.step_unit, self.times[0].dtype.kind == "M", self.source).amount
        return np.stack(
            [
                np.diff(np.concatenate([own[-1:], later])) / unit
                for own, later in zip(self.times, coming, strict=True)
            ]
        )

    def _step(self) -> Step:
        return parse_step(self.step, self.times[0].dtype.kind == "M", self.source)

    @functools.cached_property
    def summary(self) -> Summary:
        """What is to be known of all series, found once."""
        columns = [self.ys[:, :, i][self.mask[:, :, i]] for i in range(len(self.names))]
        names = ("",) if self.series is None else self.series
        digests = [digest_of(name, self.times[i], **self.one(i)) for i, name in enumerate(names)]
        return Summary(
            series=tuple(str(name) for name in names[:MOST_NAMED]),
            num_series=self.num_series,
            num_rows=int(self.length.sum()),
            num_rows_observed=int(self.mask.any(axis=2).sum()),
            shortest=int(self.length.min()),
            longest=int(self.length.max()),
            inserted=self.inserted,
            begin=min(as_number(times[0]) for times in self.times),
            end=max(as_number(times[-1]) for times in self.times),
            seen=tuple(int(column.size) for column in columns),
            lowest=tuple(float(column.min()) if column.size else None for column in columns),
            highest=tuple(float(column.max()) if column.size else None for column in columns),
            digest=sum(digests) % 2**256,
            notes=self.notes,
        )

    def described(self, of: Summary | None = None) -> list[str]:
        """What was understood of the table, a line each: for people to read before a long run.

        Args:
            of: what is known of a larger table of which this is a part; by default of this one.
        """
        whole = self.summary if of is None else of
        lines = [f"source: {self.source}", f"rows: {whole.num_rows}, in {whole.num_series} series"]
        if self.series is not None:
            lines.append(f"series: {listed(whole.series, count=whole.num_series)}")
            if whole.num_series > 1:
                lines.append(f"rows of a series: {whole.shortest} to {whole.longest}")
        name = "the row number" if self.time_name is None else f"column {self.time_name!r}"
        dates = self.times[0].dtype.kind == "M"
        begin, end = (written(as_time(time, dates)) for time in (whole.begin, whole.end))
        step = "irregular" if self.step is None else f"step {self.step}"
        lines.append(f"time: {name}, {begin} to {end}, {step}")
        columns = zip(self.names, whole.seen, whole.lowest, whole.highest, strict=True)
        for column, seen, lowest, highest in columns:
            gone = whole.num_rows - seen
            share = 100 * gone / whole.num_rows
            missing = f", {gone} missing ({share:.1f} %)" if gone else ", none missing"
            span = f"{lowest:g} to {highest:g}" if seen else "nothing seen"
            lines.append(f"column {column!r}: {span}{missing}")
        for place, column in enumerate(self.input_names):
            is_step = self.step_unit is not None and not place
            unit = f", in units of {self.step_unit}" if is_step else ""
            lines.append(f"input {column!r}{unit}")
        rows = f"{whole.inserted} row{'s' if whole.inserted > 1 else ''} inserted in gaps"
        return [*lines, *whole.notes, *([rows] if whole.inserted else [])]

    def leading_series(self) -> "Table":
        """The first series, as many as have 100,000 rows together, and at least one.

        Twice as many as long as a column was seen less than twice in them.
        """
        count = np.searchsorted(np.cumsum(self.length), MOST_LEADING_ROWS, side="right")
        count = max(1, int(count))
        while count < self.num_series and self.mask[:count].sum(axis=(0, 1)).min() < 2:
            count *= 2
        if count >= self.num_series:
            return self
        some = self._some(np.arange(count))
        return some.padded(int(some.length.max()))

    def _some(self, places: np.ndarray) -> "Table":
        return dataclasses.replace(
            self,
            ys=self.ys[places],
            mask=self.mask[places],
            inputs=None if self.inputs is None else self.inputs[places],
            length=self.length[places],
            times=tuple(self.times[i] for i in places),
            series=None if self.series is None else tuple(self.series[i] for i in places),
        )


@dataclass(frozen=True)
class Piece:
    """One series without padding."""

    times: np.ndarray
    ys: np.ndarray
    inputs: np.ndarray | None


def stack(pieces: Sequence[Piece], rows: int) -> dict[str, Any]:
    """The fields of a `Table` that hold arrays: series padded to `rows` rows."""
    length = np.array([len(piece.ys) for piece in pieces])
    ys = np.full((len(pieces), rows, pieces[0].ys.shape[1]), np.nan)
    for i, piece in enumerate(pieces):
        ys[i, : length[i]] = piece.ys
    inputs = None
    if pieces[0].inputs is not None:
        inputs = np.empty((len(pieces), rows, pieces[0].inputs.shape[1]))
        for i, piece in enumerate(pieces):
            # The last row again, and not zeros: a step of length zero has no density.
            inputs[i] = piece.inputs[np.minimum(np.arange(rows), length[i] - 1)]  # type: ignore[index]
    return {
        "ys": ys,
        "mask": ~np.isnan(ys),
        "inputs": inputs,
        "length": length,
        "times": tuple(piece.times for piece in pieces),
    }


MOST_PADDED, MOST_PADDING = 1_000_000, 100
"""The most rows to pad to, or so many times the longest series if that is more."""


def padded_length(longest: int, pad_to: int | str | None, owner: str) -> int:
    """How many rows to pad to.

    `"bucket"` is the next power of two up to 64, and the next multiple of 64 beyond, so that series
    of new lengths seldom compile anew.
    """
    if pad_to is None:
        return longest
    if pad_to == "bucket":
        return 1 << (longest - 1).bit_length() if longest <= 64 else -(-longest // 64) * 64
    if isinstance(pad_to, bool) or not isinstance(pad_to, int | np.integer):
        raise DataError(f"{owner}: pad_to={pad_to!r}; give a number of rows, 'bucket' or None.")
    if pad_to < longest:
        raise DataError(
            f"{owner}: pad_to={pad_to}, but the longest series has {longest} rows; give more."
        )
    if pad_to > max(MOST_PADDED, MOST_PADDING * longest):
        raise DataError(
            f"{owner}: pad_to={pad_to}, and the longest series has {longest} rows; give at most"
            f" {max(MOST_PADDED, MOST_PADDING * longest)}."
        )
    return int(pad_to)
