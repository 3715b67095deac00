"""Rows as they arrive: lines of comma-separated values, read like the table of a run."""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from retrodict._interface import DataError
from retrodict.data._files import text_source
from retrodict.data._source import Source
from retrodict.data._steps import IRREGULAR, Step, parse_step, positions
from retrodict.data._summary import written
from retrodict.data._table import Rows
from retrodict.data._timestamps import timestamps

MAX_MISSING = 100_000
"""A longer gap of a stream is an error in a time: each of its rows would be answered."""


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
        self._source([header])  # check the columns early; a table needs a row

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
        source = self._source(lines)
        source = dataclasses.replace(source, lines=source.lines + first - 1)
        ys, us = source.stack(self.columns), source.inputs(self.inputs)
        rows = Rows(self._times(source, len(ys)), ys, us)
        if self.last is not None:
            self._check_kind(source, rows.times)
            if self.last == self.resumed:  # afterwards rows must be in order
                old = int(np.sum(~np.logical_or.accumulate(rows.times > self.last)))
                self.skipped += old
                source = dataclasses.replace(source, lines=source.lines[old:])
                rows = rows.cut(old)
            if not len(rows.ys):
                return self._no_rows()
            rows = _after(self.last, rows)
            source = dataclasses.replace(source, lines=np.append(0, source.lines))
        rows = self._on_grid(source, rows).cut(0 if self.last is None else 1)
        self.last = rows.times[-1]
        return rows

    def _source(self, lines: Iterable[str]) -> Source:
        """Parse lines; refuse them without the columns of the layout."""
        source = text_source([f"{line}\n" for line in (self.header, *lines)], self.owner)
        time = [self.layout["time"]] if self.layout["time"] else []
        source.require([*self.columns, *self.inputs, *time], "of the run")
        return source

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
            raise self._error(
                source,
                0,
                f"{written(times[0])} is {kinds[0]}, and the time before it, {written(self.last)},"
                f" is {kinds[1]}; write all times in one way.",
            )

    def _error(self, source: Source, row: int, text: str) -> DataError:
        return source.error(text, row=row, column=self.layout["time"])

    def _on_grid(self, source: Source, rows: Rows) -> Rows:
        """Insert rows in gaps, and add the step; the rows begin with the last one, if any."""
        times = rows.times
        later = times[1:] > times[:-1]
        if not later.all():
            at = int(np.argmin(later)) + 1
            raise self._error(
                source,
                at,
                f"{written(times[at])} is not later than {written(times[at - 1])}, the time of the"
                " previous row; rows must be in order of time.",
            )
        unit, dates = None, times.dtype.kind == "M"
        if self.layout["freq"] != IRREGULAR:
            step = parse_step(self.layout["freq"], dates, self.owner)
            rows = rows.on_grid(self._places(source, rows, step), step)
        elif self.layout["step_input"]:
            unit = parse_step(self.layout["step_unit"], dates, self.owner).amount
        return rows.with_step(unit) if self.layout["step_input"] else rows

    def _places(self, source: Source, rows: Rows, step: Step) -> np.ndarray:
        """Return the places of rows on the grid; refuse a long gap, and any gap in inputs."""
        times = rows.times
        places = positions(times, step)
        if places is None:
            at = 1 + bisect.bisect(
                range(1, len(times)), False, key=lambda at: positions(times[: at + 1], step) is None
            )
            raise self._error(
                source,
                at,
                f"{written(times[at])} is not a whole number of steps of {step.name} after"
                f" {written(times[at - 1])}, the time of the previous row; correct it.",
            )
        gaps = np.diff(places) - 1
        has_inputs = rows.inputs is not None
        if gaps.size and gaps.max() > (0 if has_inputs else MAX_MISSING):
            at = int(np.argmax(gaps))
            reason = "and their inputs are needed; add them" if has_inputs else "too many for a gap"
            raise self._error(
                source,
                at + 1,
                f"{gaps[at]} rows are missing between {written(times[at])} and"
                f" {written(times[at + 1])}, {reason}.",
            )
        return places

    def _no_rows(self) -> Rows:
        width = len(self.inputs) + bool(self.layout["step_input"])
        inputs = np.zeros((0, width)) if width else None
        return Rows(np.zeros(0), np.zeros((0, len(self.columns))), inputs)


def _after(last: Any, rows: Rows) -> Rows:
    """Return rows after one of this time, whose entries are missing."""
    times = np.concatenate([np.array([last]), rows.times])
    ys = np.pad(rows.ys, ((1, 0), (0, 0)), constant_values=np.nan)
    inputs = None if rows.inputs is None else np.pad(rows.inputs, ((1, 0), (0, 0)))
    return Rows(times, ys, inputs)
