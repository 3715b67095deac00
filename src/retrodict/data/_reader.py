"""The reader: files, frames and arrays to series that the functions of the library take."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrodict._interface import Argument, DataError, listed
from retrodict.data._identifiers import grouped
from retrodict.data._objects import to_source
from retrodict.data._source import Source, parse_numbers
from retrodict.data._steps import (
    IRREGULAR,
    MOST_INSERTED,
    Step,
    duration_name,
    find_step,
    parse_step,
    positions,
)
from retrodict.data._summary import written
from retrodict.data._table import Rows, Table, padded_length, stack
from retrodict.data._timestamps import find_code, find_time, timestamps

STEP_NAME = "step"
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


def read(
    source: Any,
    *,
    time: str | None = None,
    series: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    inputs: str | Sequence[str] | None = None,
    freq: str | int | float | None = None,
    step_input: bool = False,
    step_unit: str | int | float | None = None,
    time_format: str | None = None,
    pad_to: int | str | None = None,
) -> Table:
    r"""Read a table of one or more series.

    Rows are sorted by time. If times are regular except for gaps, rows without observations are
    inserted in the gaps: the state moves through them. Rows are never dropped, and values never
    rescaled.

    Example:
        >>> import pandas as pd, retrodict as rd
        >>> frame = pd.DataFrame({"year": [1871, 1872, 1874], "flow": [1120.0, 1160.0, 1210.0]})
        >>> table = rd.data.read(frame)
        >>> table.ys[0, :, 0].tolist()
        [1120.0, 1160.0, nan, 1210.0]
        >>> print(*table.described(), sep="\n")
        source: the DataFrame
        rows: 4, in 1 series
        time: column 'year', 1871 to 1874, step 1
        column 'flow': 1120 to 1210, 1 missing (25.0 %)
        1 row inserted in gaps

    Args:
        source: the path of a `.csv`, `.tsv`, `.parquet` or `.nc` file; a DataFrame or
            Series of pandas or polars; a table of Arrow; an xarray Dataset or DataArray; a mapping
            of names to arrays; or an array of shape `(time,)`, `(time, obs)` or
            `(batch, time, obs)`.
        time: the time column. By default an index of dates; else the column called time, date,
            datetime, timestamp, t or year; else the only one that holds dates; else a numeric
            index; else the row number.
        series: the columns that identify series.
        columns: the observed columns, in this order. By default all numeric columns without another
            role.
        inputs: the columns of inputs, which must not be missing in any row.
        freq: the step of the times: a number, or an alias of pandas such as `"D"`, `"W-SAT"` or
            `"6h"`, or `"3 months"`. Detected by default. `"irregular"` inserts no rows, and ignores
            the spacing unless `step_input` is set.
        step_input: whether to add the time since the previous row as the first input, called
            `step`; it is 1 in the first row.
        step_unit: the unit of that input; the median step by default. On a regular grid the unit is
            the step.
        time_format: the format of dates, such as `"%d/%m/%Y"`; ISO 8601 by default. Whole numbers
            such as 200001 or 20000131 are recognised as dates, unless `freq` is a number.
        pad_to: the number of rows to pad to, or `"bucket"`: the next power of two up to 64, the
            next multiple of 64 beyond. By default the length of the longest series.

    Returns:
        A `Table`.

    Raises:
        DataError: if the table cannot be read or is inconsistent, in one line.
    """
    keys, observed, driving = as_names(series), as_names(columns), as_names(inputs)
    table = to_source(source, time=time, series=keys, keep=[*observed, *driving])
    keys = keys or list(table.series)
    for names, role in ((keys, "series"), (observed, "columns"), (driving, "inputs")):
        table.require(names, role)
    _check_roles(table, time, keys, observed, driving)
    require_rows(table)
    time_name = find_time(table, time, [*keys, *observed, *driving])
    notes: list[str] = []
    if columns is None:
        taken = [*keys, *driving, *([time_name] if time_name else [])]
        observed = _data_columns(table, taken, notes)
        if time_name is None:
            notes.extend(_possible_times(table, [*keys, *driving, *observed]))
    elif not observed:
        raise table.error(
            Argument("columns", []), " is empty; name the observed columns, or leave it out."
        )
    ys, us = table.stack(observed), table.inputs(driving)
    if not table.is_part:
        _check_filled(table, observed, ys)

    identifiers, groups = grouped(table, keys)
    if time_name is not None and time_format is None and (freq is None or isinstance(freq, str)):
        time_format = find_code(table, time_name)
        if time_format is not None:
            notes.append(f"times read as dates in the format {time_format}")
    groups, times = _sort(table, time_name, time_format, groups, notes)
    step = _step(table, times, freq, step_input)
    pieces = [
        Rows(series_times, ys[rows], None if us is None else us[rows])
        for rows, series_times in zip(groups, times, strict=True)
    ]
    if step is not None:
        pieces = _all_on_grid(table, pieces, groups, identifiers, driving, step)
    unit = None
    if step_input:
        if STEP_NAME in driving:
            raise table.error("an input is called 'step' already; rename it.", column=STEP_NAME)
        duration, unit = _unit(table, times, step, step_unit)
        pieces = [piece.with_step(duration) for piece in pieces]
    rows = padded_length(max(len(piece.ys) for piece in pieces), pad_to, table.name)
    return Table(
        **stack(pieces, rows),
        names=tuple(observed),
        series=identifiers,
        input_names=(*([STEP_NAME] if step_input else []), *driving),
        time_name=time_name,
        step=None if step is None else step.name,
        step_unit=unit,
        layout={
            "time": time_name,
            "series": keys or None,
            "columns": observed,
            "inputs": driving or None,
            "freq": IRREGULAR if step is None else step.name,
            "step_input": step_input,
            "step_unit": unit if step is None else None,
            "time_format": time_format,
            "pad_to": "bucket" if pad_to == "bucket" else None,
        },
        kind=table.kind,
        source=table.name,
        notes=tuple(notes),
        inserted=sum(len(piece.ys) for piece in pieces) - len(ys),
    )


def read_times(source: Any, table: Table) -> tuple[np.ndarray, ...]:
    """Read the times of rows after the end of a table, which a forecast of irregular times needs.

    Example:
        >>> import retrodict as rd
        >>> table = rd.data.read({"t": [0.0, 1.0, 2.5], "y": [1.0, 2.0, 3.0]}, step_input=True)
        >>> future = rd.data.read_times({"t": [3.0, 5.5]}, table)
        >>> future[0].tolist(), table.steps_to(future).tolist()
        ([3.0, 5.5], [[0.4, 2.0]])

    Args:
        source: any source that `read` accepts, with the time column of the table, and its
            identifiers if it has several series; other columns are ignored.
        table: the table.

    Returns:
        The times of each series, in the order of the table.

    Raises:
        DataError: if they cannot be read, belong to other series, or are not later.
    """
    layout = table.layout
    time, keys = layout["time"], layout["series"] or []
    if time is None:
        raise DataError(
            f"{table.source}: the row number is the time, which needs no file of times."
        )
    future = to_source(source, time=time, series=keys, keep=[])
    future.require([time], "time")
    future.require(keys, "series")
    require_rows(future)
    identifiers, groups = grouped(future, keys)
    if identifiers != table.series:
        raise future.error(
            f"expected times of the series {listed(table.series or ())}, got times of"
            f" {listed(identifiers or ())}."
        )
    _, times = _sort(future, time, layout["time_format"], groups, [])
    try:
        return table.coming(times)
    except ValueError as error:
        raise future.error(error, column=time) from error


def as_names(names: str | Sequence[str] | None) -> list[str]:
    """Return a list of names; one name may be passed alone."""
    if names is None:
        return []
    return [names] if isinstance(names, str) else [str(name) for name in names]


def require_rows(table: Source) -> None:
    """Refuse a table without rows."""
    if not len(table.frame):
        raise table.error("there are no rows; add some.")


def _check_roles(
    table: Source, time: str | None, keys: list[str], observed: list[str], driving: list[str]
) -> None:
    """Refuse a column with two roles; an observed column may be an input too."""
    labels = [*([time] if time else []), *keys]
    for name in [*observed, *driving]:
        if name in labels:
            raise table.error(
                "it is data and also the time or the series; choose one role.", column=name
            )
    for names in (labels, observed, driving):
        for name, count in Counter(names).items():
            if count > 1:
                raise table.error("it is named twice; name it once.", column=name)


def _data_columns(table: Source, taken: list[str], notes: list[str]) -> list[str]:
    """Return all numeric columns without another role."""
    free = [name for name in table.frame.columns if name not in (*taken, *table.index)]
    numeric = [name for name in free if _is_numeric(table, name)]
    if not numeric:
        for name in free:
            if DECIMAL_COMMA.fullmatch(str(table.frame[name].iloc[0]).strip()):
                table.numbers(name)  # raises, with the remedy
        raise table.error(
            f"there is no column of numbers besides {listed(taken) or 'the index'}; name the"
            " observed columns with ",
            Argument("columns"),
        )
    numeric = [name for name in numeric if not table.counts_rows(name)] or numeric
    ignored = [name for name in table.frame.columns if name not in (*taken, *numeric)]
    if ignored:
        notes.append(f"ignored: {listed(ignored)}")
    return numeric


def _is_numeric(table: Source, name: str) -> bool:
    """Return whether at least half of the cells are numbers; the others are then errors."""
    values, invalid = parse_numbers(table.frame[name])
    return int(np.sum(invalid)) <= int(np.sum(~np.isnan(values)))


def _possible_times(table: Source, taken: list[str]) -> list[str]:
    """Return a note on a column of distinct texts with digits, if there is no time column."""
    for name in table.frame.columns:
        cells = table.frame[name].tolist()
        if name not in (*taken, *table.index) and len(set(cells)) == len(cells):
            if all(isinstance(cell, str) and any(map(str.isdigit, cell)) for cell in cells):
                return [f"no time column was found: is it {name!r}? Name it, and its format"]
    return []


def _sort(
    table: Source,
    time: str | None,
    time_format: str | None,
    groups: list[np.ndarray],
    notes: list[str],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the rows and times of each series in order of time."""
    if time is None:
        return groups, [np.arange(len(rows)) for rows in groups]
    stamps = timestamps(table, time, time_format)
    ordered = [rows[np.argsort(stamps[rows], kind="stable")] for rows in groups]
    for rows in ordered:
        same = stamps[rows[1:]] == stamps[rows[:-1]]
        if same.any():
            first, second = sorted(rows[np.argmax(same) :][:2].tolist())
            remedy = [", or name what identifies series with ", Argument("series")]
            raise table.error(
                f"the time {written(stamps[second])} is in {table.unit} {table.lines[first]} too;"
                " remove one of them",
                *(remedy if len(groups) == 1 else ["."]),
                row=second,
                column=time,
            )
    if any(np.any(np.diff(rows) < 0) for rows in ordered):
        notes.append("rows sorted by time")
    return ordered, [stamps[rows] for rows in ordered]


def _step(table: Source, times: list[np.ndarray], freq: Any, step_input: bool) -> Step | None:
    """Return the step that was passed or detected; `None` for irregular times."""
    if isinstance(freq, str) and freq == IRREGULAR:
        return None
    if freq is not None:
        return parse_step(freq, times[0].dtype.kind == "M", table.name)
    if max(len(series) for series in times) == 1:
        raise table.error(
            "one row is not a series; add rows, or pass the step of the times with ",
            Argument("freq"),
            row=0,
        )
    step, reason = find_step(times)
    if step is None and not step_input:
        raise table.error(
            f"the times are irregular ({reason}); pass ",
            Argument("step_input", True),
            " for a model that takes the step length, or ",
            Argument("freq", IRREGULAR),
            " to ignore the spacing.",
        )
    return step


def _check_filled(table: Source, observed: list[str], ys: np.ndarray) -> None:
    """Refuse an observed column without any value."""
    for place, name in enumerate(observed):
        if np.isnan(ys[:, place]).all():
            remedy = "every value is missing; name the others with "
            raise table.error(remedy, Argument("columns"), column=name)


def _all_on_grid(
    table: Source,
    pieces: list[Rows],
    groups: Sequence[np.ndarray],
    identifiers: tuple[int | str, ...] | None,
    driving: list[str],
    step: Step,
) -> list[Rows]:
    """Insert the rows that are missing on the grid of times, in each series."""
    owners = [""] if identifiers is None else [f" of series {name!r}" for name in identifiers]
    return [
        _on_grid(table, piece, rows, owner, driving, step)
        for piece, rows, owner in zip(pieces, groups, owners, strict=True)
    ]


def _on_grid(
    table: Source, piece: Rows, rows: np.ndarray, owner: str, driving: list[str], step: Step
) -> Rows:
    """Insert rows where the grid of a series has none.

    Args:
        table: the table, for messages.
        piece: the series.
        rows: the numbers of its rows in the table.
        owner: the series, for messages.
        driving: the names of its inputs.
        step: the step of the grid.
    """
    places = positions(piece.times, step)
    if places is None:
        raise table.error(
            f"not all times{owner} are on a grid of step {step.name} from"
            f" {written(piece.times[0])}; correct them, or pass another ",
            Argument("freq"),
        )
    count = int(places[-1]) + 1
    irregular = Argument("freq", IRREGULAR)
    if count > MOST_INSERTED * (table.num_rows or len(table.frame)):
        remedy = (Argument("freq"), ", or ", irregular, ".")
        raise table.error(
            f"a step of {step.name} would make {count} rows of {len(rows)}{owner}; pass a larger"
            " step with ",
            *remedy,
        )
    completed = piece.on_grid(places, step)
    if driving and count > len(rows):
        gap = int(np.argmax(np.diff(places) > 1))
        remedy = (irregular, " and ", Argument("step_input", True), ".")
        raise table.error(
            f"there is no row for {written(completed.times[places[gap] + 1])}, and its inputs"
            f" ({listed(driving)}) are needed; add the row, or pass ",
            *remedy,
            row=int(rows[gap]),
        )
    return completed


def _unit(
    table: Source, times: list[np.ndarray], step: Step | None, step_unit: Any
) -> tuple[Any, str | int | float]:
    """Return the duration that counts as one step, `None` on a regular grid, and its name."""
    if step is not None:
        return None, step.name
    dates = times[0].dtype.kind == "M"
    if step_unit is not None:
        unit = parse_step(step_unit, dates, table.name)
        if unit.kind not in ("number", "fixed"):
            argument = Argument("step_unit", step_unit)
            remedy = " has no fixed length; pass e.g. '7D' or '6h'."
            raise DataError(f"{table.name}: ", argument, remedy)
        return unit.amount, unit.name if dates else float(unit.amount)
    differences = np.concatenate([np.diff(series) for series in times])
    if not differences.size:
        raise table.error("one row has no step; pass its unit with ", Argument("step_unit"), row=0)
    if dates:
        duration = np.timedelta64(int(np.median(differences.astype(np.int64))), "us")
        return duration, duration_name(duration)
    return np.median(differences), float(np.median(differences))
