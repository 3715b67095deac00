"""The numbers of a report's charts, as the JSON that its script reads."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrodict.runs._content import Band, Series, SeriesPanel, is_dated

MANY_ROWS = 20_000
"""Longer series have one significant digit less, which keeps reports small."""


def chart_data(series: Sequence[Series], level: str) -> dict[str, Any]:
    """Return the series as a tree that JSON can store; non-finite values become null.

    Args:
        series: the series on the page.
        level: the name of the bands, such as "90% band".
    """
    axes: dict[str, Any] = {}  # panels share their times: each axis is written once

    def axis(times: np.ndarray) -> int:
        values = _axis(times)
        name = json.dumps(values)
        axes.setdefault(name, (len(axes), values))
        return axes[name][0]

    def band(source: Band | SeriesPanel, digits: int) -> dict[str, Any]:
        names = ("centre", "lower", "upper")
        values: dict[str, Any] = {name: _numbers(getattr(source, name), digits) for name in names}
        if source.hollow is not None:
            ends = (source.hollow.lower, source.hollow.upper)
            values["hollow"] = [_numbers(end, digits) for end in ends]
        return {"axis": axis(source.times), **values}

    def panel(source: SeriesPanel) -> dict[str, Any]:
        digits = _digits(source)
        return {
            "title": source.title,
            **band(source, digits),
            "observed": None if source.observed is None else _numbers(source.observed, digits),
            "missing": source.gaps().tolist(),
            "forecast": None if source.forecast is None else band(source.forecast, digits),
        }

    panels = [{"name": one.name, "panels": [panel(p) for p in one.panels]} for one in series]
    return {"level": level, "axes": [values for _, values in axes.values()], "series": panels}


def milliseconds(times: np.ndarray) -> np.ndarray:
    """Return dates as milliseconds since 1970, and other times unchanged."""
    return times.astype("datetime64[us]").astype(np.int64) / 1000 if is_dated(times) else times


def _axis(times: np.ndarray) -> dict[str, Any]:
    """Return times with all their digits; evenly spaced ones as start, step and count."""
    values, kind = milliseconds(times), "date" if is_dated(times) else "number"
    if values.dtype.kind == "f" and np.all(values == np.floor(values)):
        values = values.astype(np.int64) if np.all(np.abs(values) < 2**53) else values
    if values.size > 2:
        start, step = values[0], values[1] - values[0]
        if np.array_equal(start + step * np.arange(values.size), values):
            regular = {"start": start.item(), "step": step.item(), "count": values.size}
            return {"kind": kind, **regular}
    return {"kind": kind, "values": values.tolist()}


def _digits(panel: SeriesPanel) -> int:
    """Return the significant digits of a panel: six of what varies around a large level."""
    least = 5 if panel.times.size > MANY_ROWS else 6
    columns = [panel.centre, panel.lower, panel.upper, panel.observed]
    values = np.concatenate([np.asarray(c, float) for c in columns if c is not None])
    values = values[np.isfinite(values)]
    spread = np.ptp(values) if values.size else 0.0
    if spread == 0:
        return least
    return min(15, least + max(0, math.ceil(math.log10(np.abs(values).max() / spread) - 0.5)))


def _numbers(values: np.ndarray, digits: int) -> list[float | int | None]:
    form = f"%.{digits}g"
    rounded = [float(form % value) for value in np.asarray(values, float).tolist()]
    return [
        None if not math.isfinite(v) else int(v) if v.is_integer() and abs(v) < 1e15 else v
        for v in rounded
    ]
