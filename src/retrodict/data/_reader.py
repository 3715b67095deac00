"""The reader: whatever holds a table to series that the verbs of the library take."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrodict.data._columns import is_numeric, numbers, parsed
from retrodict.data._errors import DataError, listed
from retrodict.data._identifiers import grouped
from retrodict.data._objects import to_source
from retrodict.data._source import ROW_NAMES, Source
from retrodict.data._steps import (
    MOST_INSERTED,
    Step,
    complete,
    find_step,
    name_of_stretch,
    parse_step,
    positions,
)
from retrodict.data._summary import written
from retrodict.data._table import Piece, Table, padded_length, stack
from retrodict.data._timestamps import find_code, find_time, stamps

STEP_NAME = "step"
IRREGULAR = "irregular"
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
    r"""Reads a table of one or more series.

    Rows are sorted by time. If times are regular but for gaps, rows are inserted where some are
    missing, with nothing observed: the state moves on through them. Rows are never dropped, values
    never rescaled.

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
        series: the column, or columns, whose values tell series apart.
        columns: what is observed, in this order. By default every numeric column without another
            role.
        inputs: columns of inputs, which must be known in every row.
        freq: the step of the times: a number, or an alias of pandas such as `"D"`, `"W-SAT"` or
            `"6h"`, or `"3 months"`. By default it is found. `"irregular"` inserts nothing, and
            leaves the spacing out of account if there is no `step_input`.
        step_input: whether to add the time since the row before as the first input, called `step`;
            1 in the first row.
        step_unit: what counts as 1 in that input; the median step by default. Times on a grid count
            in steps of the grid.
        time_format: how dates are written, as `"%d/%m/%Y"`; ISO 8601 by default. Whole numbers such
            as 200001 or 20000131 are recognised as dates, unless `freq` is a number.
        pad_to: the number of rows to pad to, or `"bucket"`: the next power of two up to 64, the
            next multiple of 64 beyond. By default the length of the longest series.

    Returns:
        A `Table`.

    Raises:
        DataError: if the table cannot be read or does not make sense, in one line.
    """
    apart, wanted, driving = _names(series), _names(columns), _names(inputs)
    table = to_source(source, time=time, series=apart, keep=[*wanted, *driving])
    apart = apart or list(table.series)
    for names, role in ((apart, "series"), (wanted, "columns"), (driving, "inputs")):
        table.require(names, role)
    _check_roles(table, time, apart, wanted, driving)
    if not len(table.frame):
        raise table.error("there are no rows; add some.")
    time_name = find_time(table, time, [*apart, *wanted, *driving])
    notes: list[str] = []
    if columns is not None and not wanted:
        raise table.error("columns names nothing; name what is observed, or leave it out.")
    if columns is None:
        taken = [*apart, *driving, *([time_name] if time_name else [])]
        wanted = _data_columns(table, taken, notes)
        if time_name is None:
            notes.extend(_maybe_times(table, [*apart, *driving, *wanted]))
    ys = np.stack([numbers(table, name) for name in wanted], axis=1)
    us = np.stack([numbers(table, name) for name in driving], axis=1) if driving else None
    _check_filled(table, wanted, ys, driving, us)

    identifiers, groups = grouped(table, apart)
    if time_name is not None and time_format is None and (freq is None or isinstance(freq, str)):
        time_format = find_code(table, time_name)
        if time_format is not None:
            notes.append(f"times read as dates by the format {time_format}; as numbers with freq=1")
    stamp = None if time_name is None else stamps(table, time_name, time_format)
    groups, times = _sorted(table, time_name, stamp, groups, bool(apart), notes)
    step = _step(table, times, freq, step_input)
    pieces = []
    for place, (rows, own) in enumerate(zip(groups, times, strict=True)):
        whose = "" if identifiers is None else f" of series {identifiers[place]!r}"
        pieces.append(_piece(table, own, rows, ys, us, driving, step, whose))
    inserted = sum(len(piece.ys) for piece in pieces) - len(ys)
    unit = None
    if step_input:
        if STEP_NAME in driving:
            raise table.error("an input is called 'step' already; rename it.", column=STEP_NAME)
        pieces, unit = _with_steps(table, pieces, step, step_unit)
        driving = [STEP_NAME, *driving]
    rows = padded_length(max(len(piece.ys) for piece in pieces), pad_to, table.name)
    return Table(
        **stack(pieces, rows),
        names=tuple(wanted),
        series=identifiers,
        input_names=tuple(driving),
        time_name=time_name,
        step=None if step is None else step.name,
        step_unit=unit,
        layout={
            "time": time_name,
            "series": apart or None,
            "columns": wanted,
            "inputs": [name for name in driving if name != STEP_NAME or not step_input] or None,
            "freq": IRREGULAR if step is None else step.name,
            "step_input": step_input,
            "step_unit": unit if step is None else None,
            "time_format": time_format,
            "pad_to": "bucket" if pad_to == "bucket" else None,
        },
        kind=table.kind,
        source=table.name,
        notes=tuple(notes),
        inserted=inserted,
    )


def read_times(source: Any, table: Table) -> tuple[np.ndarray, ...]:
    """Reads the times of rows that come after a table, which a forecast of uneven times needs.

    Example:
        >>> import retrodict as rd
        >>> table = rd.data.read({"t": [0.0, 1.0, 2.5], "y": [1.0, 2.0, 3.0]}, step_input=True)
        >>> coming = rd.data.read_times({"t": [3.0, 5.5]}, table)
        >>> coming[0].tolist(), table.steps_to(coming).tolist()
        ([3.0, 5.5], [[0.4, 2.0]])

    Args:
        source: what `read` takes, with the time column of the table, and its identifiers if it has
            several series; other columns are left aside.
        table: the table that they follow.

    Returns:
        The times of each series, in the order of the table.

    Raises:
        DataError: if they cannot be read, or are not those of the table's series, or not later.
    """
    layout = table.layout
    apart = layout["series"] or []
    if layout["time"] is None:
        raise DataError(
            f"{table.source}: the row number is the time, which needs no file of times."
        )
    given = to_source(source, time=layout["time"], series=apart, keep=[])
    given.require([layout["time"]], "time")
    given.require(apart, "series")
    if not len(given.frame):
        raise given.error("there are no rows; add some.")
    identifiers, groups = grouped(given, apart)
    if identifiers != table.series:
        raise given.error(
            f"there must be times for the series {listed(table.series or ())}, and there are some"
            f" for {listed(identifiers or ())}."
        )
    stamp = stamps(given, layout["time"], layout["time_format"])
    _, times = _sorted(given, layout["time"], stamp, groups, bool(apart), [])
    try:
        return table.coming(times)
    except ValueError as error:
        raise given.error(str(error), column=layout["time"]) from error


def _names(given: str | Sequence[str] | None) -> list[str]:
    if given is None:
        return []
    return [given] if isinstance(given, str) else [str(name) for name in given]


def _check_roles(
    table: Source, time: str | None, apart: list[str], wanted: list[str], driving: list[str]
) -> None:
    """Refuses a column with two roles; an observed column may be an input too."""
    roles = [*([time] if time else []), *apart]
    for name in [*wanted, *driving]:
        if name in roles:
            raise table.error("it is data and also the time or the series; choose.", column=name)
    for names in (roles, wanted, driving):
        for name, count in Counter(names).items():
            if count > 1:
                raise table.error("it is named twice; name it once.", column=name)


def _data_columns(table: Source, taken: list[str], notes: list[str]) -> list[str]:
    """All numeric columns without another role."""
    free = [name for name in table.frame.columns if name not in (*taken, *table.index)]
    found = [name for name in free if is_numeric(table, name)]
    if not found:
        for name in free:
            if DECIMAL_COMMA.fullmatch(str(table.frame[name].iloc[0]).strip()):
                numbers(table, name)  # says what is wrong with it
        raise table.error(
            f"there is no column of numbers besides {listed(taken) or 'the index'}; name what is"
            " observed with columns=..."
        )
    measured = [name for name in found if not _counts_rows(table, name)]
    found = measured or found
    ignored = [name for name in table.frame.columns if name not in (*taken, *found)]
    if ignored:
        notes.append(f"left aside: {listed(ignored)}")
    return found


def _maybe_times(table: Source, taken: list[str]) -> list[str]:
    """A note of text that differs in every row, where no column was found to be the time."""
    for name in table.frame.columns:
        cells = table.frame[name].tolist()
        if name not in (*taken, *table.index) and len(set(cells)) == len(cells):
            if all(isinstance(cell, str) and any(map(str.isdigit, cell)) for cell in cells):
                return [f"no time column was found: is it {name!r}? Name it, and its format"]
    return []


def _counts_rows(table: Source, name: str) -> bool:
    """Whether a column is the number of the row, as many programs write it."""
    if str(name).lower() not in ROW_NAMES:
        return False
    if table.counting is not None:
        return name in table.counting
    values, _ = parsed(table.frame[name])
    return any(np.array_equal(values, start + np.arange(len(values))) for start in (0, 1))


def _check_filled(
    table: Source, wanted: list[str], ys: np.ndarray, driving: list[str], us: np.ndarray | None
) -> None:
    """Refuses a column in which nothing was observed, and inputs that are missing."""
    for place, name in enumerate(wanted):
        if np.isnan(ys[:, place]).all() and not table.part:
            raise table.error(
                "every value is missing; name the others with columns=...", column=name
            )
    for place, name in enumerate(driving):
        gone = np.isnan(us[:, place])  # type: ignore[index]
        if gone.any():
            raise table.error(
                "an input is missing; it must be known in every row, so fill it in.",
                row=int(np.argmax(gone)),
                column=name,
            )


def _sorted(
    table: Source,
    time_name: str | None,
    stamp: np.ndarray | None,
    groups: list[np.ndarray],
    apart: bool,
    notes: list[str],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The rows and times of each series in the order of time."""
    if stamp is None:
        return groups, [np.arange(len(rows)) for rows in groups]
    unordered = 0
    for place, rows in enumerate(groups):
        order = np.argsort(stamp[rows], kind="stable")
        unordered += int(np.any(np.diff(order) < 0))
        groups[place] = rows = rows[order]
        same = np.diff(stamp[rows]) == np.zeros((), np.diff(stamp[rows]).dtype)
        if same.any():
            first, second = sorted(rows[np.argmax(same) :][:2].tolist())
            hint = "" if apart else ", or name what tells series apart with series=..."
            raise table.error(
                f"the time {written(stamp[second])} stands in {table.unit} {table.lines[first]}"
                f" too; remove one of them{hint}.",
                row=second,
                column=time_name,
            )
    if unordered:
        notes.append("rows sorted by time")
    return groups, [stamp[rows] for rows in groups]


def _step(table: Source, times: list[np.ndarray], freq: Any, step_input: bool) -> Step | None:
    """The step that was given or found; `None` if rows are to be taken as they are."""
    if freq == IRREGULAR:
        return None
    if freq is not None:
        return parse_step(freq, times[0].dtype.kind == "M", table.name)
    if max(len(own) for own in times) == 1:
        raise table.error(
            "a series needs at least 2 rows; add rows, or name the step with freq=...", row=0
        )
    step, reason = find_step(times)
    if step is None and not step_input:
        raise table.error(
            f"the times are irregular ({reason}); pass step_input=True for a model that takes the"
            " step length, or freq='irregular' to leave the spacing out of account."
        )
    return step


def _piece(
    table: Source,
    times: np.ndarray,
    rows: np.ndarray,
    ys: np.ndarray,
    us: np.ndarray | None,
    driving: list[str],
    step: Step | None,
    whose: str,
) -> Piece:
    """One series, with rows inserted where its grid has none."""
    if step is None:
        return Piece(times, ys[rows], None if us is None else us[rows])
    places = positions(times, step)
    if places is None:
        raise table.error(
            f"not all times{whose} lie on a grid of step {step.name} from {written(times[0])};"
            " correct them, or give another freq."
        )
    count = int(places[-1]) + 1
    if count > MOST_INSERTED * (table.num_rows or len(ys)):
        raise table.error(
            f"a step of {step.name} would make {count} rows of {len(rows)}{whose}; give a larger"
            " freq, or freq='irregular'."
        )
    grid = complete(times, places, step)
    if us is not None and count > len(rows):
        gap = int(np.argmax(np.diff(places) > 1))
        raise table.error(
            f"there is no row for {written(grid[places[gap] + 1])}, so that its inputs"
            f" ({listed(driving)}) are not known; add the row, or use freq='irregular' with"
            " step_input=True.",
            row=int(rows[gap]),
        )
    filled = np.full((count, ys.shape[1]), np.nan)
    filled[places] = ys[rows]
    return Piece(grid, filled, None if us is None else us[rows])


def _with_steps(
    table: Source, pieces: list[Piece], step: Step | None, given: Any
) -> tuple[list[Piece], str | int | float]:
    """Adds the time since the row before as the first input, and says in what unit."""
    if step is not None:
        unit, deltas = step.name, [np.ones(len(piece.ys)) for piece in pieces]
    else:
        stretch = _unit(table, pieces, given)
        deltas = [np.append(1.0, np.diff(piece.times) / stretch) for piece in pieces]
        dates = isinstance(stretch, np.timedelta64)
        unit = name_of_stretch(stretch) if dates else float(stretch)
    grown = []
    for piece, delta in zip(pieces, deltas, strict=True):
        known = [] if piece.inputs is None else [piece.inputs]
        grown.append(Piece(piece.times, piece.ys, np.hstack([delta[:, None], *known])))
    return grown, unit


def _unit(table: Source, pieces: list[Piece], given: Any) -> Any:
    """The stretch of time that counts as one step."""
    dates = pieces[0].times.dtype.kind == "M"
    if given is not None:
        step = parse_step(given, dates, table.name)
        if step.kind not in ("number", "fixed"):
            raise DataError(
                f"{table.name}: step_unit={given!r} has no fixed length; give e.g. '7D' or '6h'."
            )
        return step.amount
    differences = np.concatenate([np.diff(piece.times) for piece in pieces])
    if not differences.size:
        raise table.error("one row has no step; give step_unit.", row=0)
    if dates:
        return np.timedelta64(int(np.median(differences.astype(np.int64))), "us")
    return np.median(differences)
