"""Rows as they come: lines of comma-separated values, read as the table of a run was."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from retrodict._errors import DataError
from retrodict.data._columns import numbers
from retrodict.data._files import text_source
from retrodict.data._reader import IRREGULAR
from retrodict.data._steps import Step, complete, parse_step, positions
from retrodict.data._summary import written
from retrodict.data._table import Table
from retrodict.data._timestamps import stamps

MOST_MISSING = 100_000
"""A longer gap of a stream is a wrong time: each of its rows would be answered."""


class Rows(NamedTuple):
    """Rows in order of time, those inserted in gaps included.

    Attributes:
        times: dates as `datetime64[us]`, or numbers.
        ys: of shape `(time, obs)`, NaN where there is none.
        inputs: of shape `(time, input)`, or `None`.
    """

    times: np.ndarray
    ys: np.ndarray
    inputs: np.ndarray | None

    def cut(self, start: int, stop: int) -> "Rows":
        """The rows from `start` to before `stop`."""
        inputs = None if self.inputs is None else self.inputs[start:stop]
        return Rows(self.times[start:stop], self.ys[start:stop], inputs)

    @classmethod
    def of_table(cls, table: Any) -> "Rows | None":
        """Return the rows of a table of one series without identifiers; `None` of any other.

        Args:
            table: a `Table`, or a `SharedTable`, of which no process holds all rows.
        """
        if not isinstance(table, Table) or table.series is not None:
            return None
        one = table.one()
        return cls(table.times[0], one["ys"], one["inputs"])


class LiveReader:
    """Reads lines of one series as they come.

    The rules are those of `read`: gaps of a regular series become rows in which nothing was seen,
    and the length of the step is an input where the layout says so. A row without a time column is
    one step after the row before it.

    Args:
        layout: the `layout` of the table that a model was fitted to.
        header: the first line, with the names of the columns.
        last: the time of the last row that was read before, if any: leading rows up to it are
            skipped.
        owner: what the lines come from, for messages.

    Attributes:
        skipped: how many rows were skipped.

    Raises:
        DataError: if the header lacks a column of the layout.
    """

    def __init__(
        self,
        layout: Mapping[str, Any],
        header: str,
        *,
        last: Any = None,
        owner: str = "standard input",
    ):
        if layout["series"]:
            raise DataError(
                f"{owner}: the run is of several series ({', '.join(layout['series'])}), and rows"
                " are answered as they come for one series; fit one series alone."
            )
        self.layout, self.header, self.owner = layout, header, owner
        self.last, self.resumed = last, last
        self.line, self.skipped = 1, 0
        # The header may have been forgotten. It is its own first row until there is another.
        self._require(text_source(f"{header}\n{header}\n".encode(), owner))

    def read(self, lines: Sequence[str]) -> Rows:
        """The rows of some lines, which follow those that were read before.

        Args:
            lines: without the header and without line ends.

        Raises:
            DataError: if a line cannot be read, or a time is not later than the one before.
        """
        first, self.line = self.line, self.line + len(lines)
        kept = [line for line in lines if line.strip()]
        columns = self.layout["columns"]
        inputs = self.layout["inputs"] or []
        if not kept:
            return self._nothing(len(columns))
        source = text_source("\n".join([self.header, *lines]).encode(), self.owner)
        source = dataclasses.replace(source, lines=source.lines + first - 1)
        self._require(source)
        ys = np.stack([numbers(source, name) for name in columns], axis=1)
        us = np.stack([numbers(source, name) for name in inputs], axis=1) if inputs else None
        if us is not None and np.isnan(us).any():
            row, column = np.argwhere(np.isnan(us))[0]
            raise source.error("an input is missing; give it.", row=int(row), column=inputs[column])
        times = self._times(source, len(ys))
        fresh = np.ones(len(ys), bool)
        if self.last is not None:
            self._check_kind(source, times)
            if self.last == self.resumed:  # nothing new yet; afterwards rows must be in order
                fresh = np.logical_or.accumulate(times > self.last)
        self.skipped += int(len(ys) - fresh.sum())
        times, ys = times[fresh], ys[fresh]
        us = None if us is None else us[fresh]
        if not len(times):
            return self._nothing(len(columns))
        rows = np.flatnonzero(fresh)
        self._check_order(source, times, rows)
        return self._on_grid(source, times, ys, us, rows)

    def _require(self, source: Any) -> None:
        """Refuse lines without the columns of the layout."""
        layout = self.layout
        time = [layout["time"]] if layout["time"] else []
        source.require([*layout["columns"], *(layout["inputs"] or []), *time], "of the run")

    def _times(self, source: Any, count: int) -> np.ndarray:
        time = self.layout["time"]
        if time is not None:
            return stamps(source, time, self.layout["time_format"])
        begin = 0 if self.last is None else int(self.last) + 1
        return np.arange(begin, begin + count)

    def _check_kind(self, source: Any, times: np.ndarray) -> None:
        """Refuse dates after numbers, and numbers after dates."""
        names = {True: "a date", False: "a number"}
        known, given = np.asarray(self.last).dtype.kind == "M", times.dtype.kind == "M"
        if known != given:
            raise source.error(
                f"{written(times[0])} is {names[given]}, and {written(self.last)}, the last time"
                f" before it, {names[known]}; write all times in one way.",
                row=0,
                column=self.layout["time"],
            )

    def _check_order(self, source: Any, times: np.ndarray, rows: np.ndarray) -> None:
        every = self._anchored(times)
        ahead = every[1:] > every[:-1]
        if not ahead.all():
            at = int(np.argmin(ahead)) + len(times) + 1 - len(every)
            earlier = self.last if at == 0 else times[at - 1]
            raise source.error(
                f"{written(times[at])} is not later than {written(earlier)}, the row before; rows"
                " must come in order of time.",
                row=int(rows[at]),
                column=self.layout["time"],
            )

    def _anchored(self, times: np.ndarray) -> np.ndarray:
        """Times with that of the last row before them, if there is one."""
        return times if self.last is None else np.concatenate([np.array([self.last]), times])

    def _on_grid(
        self,
        source: Any,
        times: np.ndarray,
        ys: np.ndarray,
        us: np.ndarray | None,
        rows: np.ndarray,
    ) -> Rows:
        every = self._anchored(times)
        begin = len(every) - len(times)
        step = self._step(every)
        if step is None:
            steps = self._lengths(every) if self.layout["step_input"] else None
            self.last = times[-1]
            return Rows(times, ys, _joined(us, None if steps is None else steps[begin:]))
        places = positions(every, step)
        if places is None:
            at = _first_off(every, step)
            raise source.error(
                f"{written(every[at])} is not a whole number of steps of {step.name} after"
                f" {written(every[at - 1])}, the row before; correct it.",
                row=int(rows[at - begin]),
                column=self.layout["time"],
            )
        count = int(places[-1]) + 1
        gaps = np.diff(places) - 1
        widest = int(np.argmax(gaps)) if gaps.size else 0
        if gaps.size and gaps[widest] > (0 if us is not None else MOST_MISSING):
            lost = "and with them inputs; give them" if us is not None else "too many to be a gap"
            raise source.error(
                f"{gaps[widest]} rows are missing between {written(every[widest])} and"
                f" {written(every[widest + 1])}, {lost}.",
                row=int(rows[widest + 1 - begin]),
                column=self.layout["time"],
            )
        grid = complete(every, places, step)
        filled = np.full((count, ys.shape[1]), np.nan)
        filled[places[begin:]] = ys
        self.last = times[-1]
        ones = np.ones(count - begin) if self.layout["step_input"] else None
        return Rows(grid[begin:], filled[begin:], _joined(us, ones))

    def _step(self, times: np.ndarray) -> Step | None:
        freq = self.layout["freq"]
        if freq == IRREGULAR:
            return None
        return parse_step(freq, times.dtype.kind == "M", self.owner)

    def _lengths(self, times: np.ndarray) -> np.ndarray:
        """The time since the row before, in the unit of the run; 1 in the very first row."""
        unit = parse_step(self.layout["step_unit"], times.dtype.kind == "M", self.owner).amount
        return np.append(1.0, np.diff(times) / unit)

    def _nothing(self, width: int) -> Rows:
        inputs = len(self.layout["inputs"] or []) + bool(self.layout["step_input"])
        return Rows(np.zeros(0), np.zeros((0, width)), np.zeros((0, inputs)) if inputs else None)


def _first_off(times: np.ndarray, step: Step) -> int:
    """The first time that is not on the grid of those before it."""
    low, high = 1, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if positions(times[: middle + 1], step) is None:
            high = middle
        else:
            low = middle + 1
    return low


def _joined(us: np.ndarray | None, steps: np.ndarray | None) -> np.ndarray | None:
    if steps is None:
        return us
    return steps[:, None] if us is None else np.hstack([steps[:, None], us])
