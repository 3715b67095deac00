"""Rows as they arrive: lines of comma-separated values, read like the table of a run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from retrodict._errors import DataError
from retrodict.data._files import text_source
from retrodict.data._reader import check_inputs, stack_columns, with_step
from retrodict.data._source import Source
from retrodict.data._steps import IRREGULAR, Step, complete, parse_step, positions
from retrodict.data._summary import written
from retrodict.data._table import Table
from retrodict.data._timestamps import timestamps

MOST_MISSING = 100_000
"""A longer gap of a stream is an error in a time: each of its rows would be answered."""


class Rows(NamedTuple):
    """Rows in order of time, including those inserted in gaps.

    Attributes:
        times: dates as `datetime64[us]`, or numbers.
        ys: observations, of shape `(time, obs)`, with NaN for missing entries.
        inputs: inputs, of shape `(time, input)`, or `None`.
    """

    times: np.ndarray
    ys: np.ndarray
    inputs: np.ndarray | None

    def cut(self, start: int, stop: int) -> "Rows":
        """Return the rows from `start` to before `stop`."""
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
    """Reader of lines of one series as they arrive.

    The rules are those of `read`: gaps of a regular series become rows without observations, and
    the length of the step is an input if the layout has it. Without a time column each row is one
    step after the previous one.

    Args:
        layout: the `layout` of the table that a model was fitted to.
        header: the first line, with the names of the columns.
        last: the time of the last row before the stream, if any: leading rows up to it are
            skipped.
        owner: the origin of the lines, for messages.

    Attributes:
        skipped: the number of skipped rows.

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
                f"{owner}: the run has several series ({', '.join(layout['series'])}), and a stream"
                " has one series; fit a single series."
            )
        self.layout, self.header, self.owner = layout, header, owner
        self.columns, self.inputs = layout["columns"], layout["inputs"] or []
        self.last, self.resumed = last, last
        self.line, self.skipped = 1, 0
        # Check the columns early. A table needs a row: the header serves as one.
        self._require(text_source(f"{header}\n{header}\n".encode(), owner))

    def read(self, lines: Sequence[str]) -> Rows:
        """Return the rows of lines that follow those read before.

        Args:
            lines: without the header and without line ends.

        Raises:
            DataError: if a line cannot be parsed, or a time is not later than the previous one.
        """
        first, self.line = self.line, self.line + len(lines)
        if not any(line.strip() for line in lines):
            return self._no_rows()
        source = text_source("\n".join([self.header, *lines]).encode(), self.owner)
        source = dataclasses.replace(source, lines=source.lines + first - 1)
        self._require(source)
        ys, us = stack_columns(source, self.columns), stack_columns(source, self.inputs)
        check_inputs(source, self.inputs, us)
        times = self._times(source, len(ys))
        is_new = np.ones(len(ys), bool)
        if self.last is not None:
            self._check_kind(source, times)
            if self.last == self.resumed:  # afterwards rows must be in order
                is_new = np.logical_or.accumulate(times > self.last)
        self.skipped += int(np.sum(~is_new))
        if not is_new.any():
            return self._no_rows()
        rows = np.flatnonzero(is_new)
        self._check_order(source, times[rows], rows)
        return self._on_grid(source, times[rows], ys[rows], us[rows] if self.inputs else None, rows)

    def _require(self, source: Source) -> None:
        """Refuse lines without the columns of the layout."""
        time = [self.layout["time"]] if self.layout["time"] else []
        source.require([*self.columns, *self.inputs, *time], "of the run")

    def _times(self, source: Source, count: int) -> np.ndarray:
        time = self.layout["time"]
        if time is not None:
            return timestamps(source, time, self.layout["time_format"])
        begin = 0 if self.last is None else int(self.last) + 1
        return np.arange(begin, begin + count)

    def _check_kind(self, source: Source, times: np.ndarray) -> None:
        """Refuse dates after numbers, and numbers after dates."""
        is_date = [np.asarray(t).dtype.kind == "M" for t in (times, self.last)]
        kinds = ["a date" if each else "a number" for each in is_date]
        if kinds[0] != kinds[1]:
            raise source.error(
                f"{written(times[0])} is {kinds[0]}, and the time before it, {written(self.last)},"
                f" is {kinds[1]}; write all times in one way.",
                row=0,
                column=self.layout["time"],
            )

    def _check_order(self, source: Source, times: np.ndarray, rows: np.ndarray) -> None:
        every = self._with_last(times)
        increases = every[1:] > every[:-1]
        if not increases.all():
            at = int(np.argmin(increases)) + 1
            raise source.error(
                f"{written(every[at])} is not later than {written(every[at - 1])}, the time of the"
                " previous row; rows must be in order of time.",
                row=int(rows[at - len(every) + len(times)]),
                column=self.layout["time"],
            )

    def _with_last(self, times: np.ndarray) -> np.ndarray:
        """Return times with that of the last row before them, if there is one."""
        return times if self.last is None else np.concatenate([np.array([self.last]), times])

    def _on_grid(
        self,
        source: Source,
        times: np.ndarray,
        ys: np.ndarray,
        us: np.ndarray | None,
        rows: np.ndarray,
    ) -> Rows:
        every = self._with_last(times)
        begin = len(every) - len(times)
        step, dates = None, times.dtype.kind == "M"
        if self.layout["freq"] != IRREGULAR:
            step = parse_step(self.layout["freq"], dates, self.owner)
            grid, places = self._grid(source, every, step, rows, has_inputs=us is not None)
            filled = np.full((len(grid), ys.shape[1]), np.nan)
            filled[places[begin:]] = ys
            times, ys = grid[begin:], filled[begin:]
        if self.layout["step_input"]:
            lengths = np.ones(len(times))
            if step is None:
                unit = parse_step(self.layout["step_unit"], dates, self.owner).amount
                lengths = np.append(1.0, np.diff(every) / unit)[begin:]
            us = with_step(lengths, us)
        self.last = times[-1]
        return Rows(times, ys, us)

    def _grid(
        self, source: Source, times: np.ndarray, step: Step, rows: np.ndarray, *, has_inputs: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return all times of the grid, and the places of the given ones."""
        begin, column = len(times) - len(rows), self.layout["time"]
        places = positions(times, step)
        if places is None:
            at = _first_off_grid(times, step)
            raise source.error(
                f"{written(times[at])} is not a whole number of steps of {step.name} after"
                f" {written(times[at - 1])}, the time of the previous row; correct it.",
                row=int(rows[at - begin]),
                column=column,
            )
        gaps = np.diff(places) - 1
        if gaps.size and gaps.max() > (0 if has_inputs else MOST_MISSING):
            at = int(np.argmax(gaps))
            reason = "and their inputs are needed; add them" if has_inputs else "too many for a gap"
            raise source.error(
                f"{gaps[at]} rows are missing between {written(times[at])} and"
                f" {written(times[at + 1])}, {reason}.",
                row=int(rows[at + 1 - begin]),
                column=column,
            )
        return complete(times, places, step), places

    def _no_rows(self) -> Rows:
        width = len(self.inputs) + bool(self.layout["step_input"])
        inputs = np.zeros((0, width)) if width else None
        return Rows(np.zeros(0), np.zeros((0, len(self.columns))), inputs)


def _first_off_grid(times: np.ndarray, step: Step) -> int:
    """Return the first time that is not on the grid of those before it, by bisection."""
    low, high = 1, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if positions(times[: middle + 1], step) is None:
            high = middle
        else:
            low = middle + 1
    return low
