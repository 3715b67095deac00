"""The report of a run: one HTML page that needs no other file and no network."""

import json
import math
from collections.abc import Sequence
from functools import partial
from importlib import resources
from itertools import cycle
from typing import Any

import numpy as np

from retrodict._pages import render_page, visible
from retrodict.runs._plot import LINES, REGIMES, SHADE, draw_curves, draw_panels, render_picture
from retrodict.runs._report_content import (
    Band,
    Curve,
    Panel,
    ParameterLine,
    PlottedSeries,
    ReportContent,
    Shade,
    is_dated,
    milliseconds,
    percent,
)

MAX_SERIES = 50
"""The largest number of series on a page."""

MAX_NUMBERS = 1_500_000
"""The largest number of numbers on a page, about 9 bytes each; the first series is always shown."""

MANY_ROWS = 20_000
"""Longer series have one significant digit less, which keeps reports small."""

MAX_PANELS = 12
"""The largest number of panels of the static picture of a series."""

ON_PAGE = {"svg.fonttype": "none", "savefig.transparent": True}
"""The style of pictures within a page: text as text, on the background of the page."""


def page(content: ReportContent) -> str:
    """Return the report of a run as HTML.

    The charts are zoomed with the wheel, two fingers, keys or buttons. Without JavaScript the page
    shows a static picture of the first series. The same content gives the same bytes. Names of
    columns and series are shown as text, whatever they contain.

    Args:
        content: the content of the report.
    """
    sizes = [
        sum(4 * p.smoothed.times.size for p in one.panels) for one in content.series[:MAX_SERIES]
    ]
    count = int(np.searchsorted(np.cumsum(sizes), MAX_NUMBERS, side="right"))
    series = content.series[: max(1, count)]
    panels = [panel for one in series for panel in one.panels]
    level = f"{percent(content.level)} band"
    return render_page(
        "retrodict.runs",
        "report.html",
        script=_script() if series else "",
        title=content.title,
        content=content,
        series=series,
        panels=panels,
        regimes=[
            (f"regime {j + 1}", REGIMES[j % len(REGIMES)])
            for j in range(max((_num_regimes(panel) for panel in panels), default=0))
        ],
        shade=SHADE,
        has_gaps=any(panel.gaps().size for panel in panels),
        level=level,
        picture=_picture(series[0], content) if series else None,
        ranges=[_range(one, panel) for one in series for panel in one.panels],
        interval=f"{percent(content.level)} interval",
        parameters=[_parameter(line) for line in content.parameters],
        training=_training(content) if content.training else None,
        payload=chart_data(series, level),
    )


def _num_regimes(panel: Panel) -> int:
    return 0 if panel.regimes is None else panel.regimes.probabilities.shape[1]


def _script() -> str:
    folder = resources.files("retrodict.runs").joinpath("templates")
    parts = [folder.joinpath(name).read_text("utf-8") for name in ("axis.js", "charts.js")]
    return f'(() => {{\n"use strict";\n{parts[0]}\n{parts[1]}}})();\n'


def _picture(series: PlottedSeries, content: ReportContent) -> bytes:
    """Return the first panels of a series as SVG."""
    panels = series.panels[:MAX_PANELS]
    draw = partial(draw_panels, panels=panels, level=content.level, centre=content.centre)
    return render_picture("svg", len(panels), draw, **ON_PAGE)


def _range(series: PlottedSeries, panel: Panel) -> list[str]:
    values = panel.observed if panel.observed is not None else np.zeros(0)
    values = values[np.isfinite(values)]
    extent = f"{number(values.min())} to {number(values.max())}" if values.size else "–"
    return [series.name, panel.title, str(panel.smoothed.times.size), str(values.size), extent]


def number(value: float | None, digits: int = 4) -> str:
    """Return a number as text; a dash if it is not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.{digits}g}".replace("-", "−")


def _estimate(value: float | None, error: float | None) -> str:
    """Return an estimate with the digits that its standard error justifies, at least four."""
    if value is None or not (error and math.isfinite(error) and math.isfinite(value) and value):
        return number(value)
    needed = math.floor(math.log10(abs(value))) - math.floor(math.log10(error)) + 2
    return number(value, min(12, max(4, needed)))


def _parameter(line: ParameterLine) -> list[str]:
    """Return the cells of a parameter."""
    ends = [_estimate(end, line.error) for end in line.interval or ()]
    interval = " to ".join(ends) or line.note or "–"
    learned = "learned" if line.learned else "fixed"
    estimate = _estimate(line.estimate, line.error)
    return [line.name, estimate, number(line.error, 2), interval, learned]


def _training(content: ReportContent) -> tuple[bytes, str]:
    """Return the picture of the training curves, and its caption."""
    values = np.concatenate([np.asarray(c.values, float) for c in content.training])
    limits, num_below = _limits(values[np.isfinite(values)])
    draw = partial(draw_curves, curves=content.training, limits=limits)
    curves = [
        f"{curve.name}: {style} line, {number(_last(curve), 6)} at the end"
        for curve, (style, _) in zip(content.training, cycle(LINES), strict=False)
    ]
    label = content.training_label or "Objective"
    below = f" {num_below} values are below the chart." if num_below else ""
    caption = f"{label} by step. {'; '.join(curves)}.{below}"
    return render_picture("svg", 1, draw, **ON_PAGE), caption


def _last(curve: Curve) -> float | None:
    finite = curve.values[np.isfinite(curve.values)]
    return float(finite[-1]) if finite.size else None


def _limits(values: np.ndarray) -> tuple[tuple[float, float] | None, int]:
    """Return limits that a poor start does not stretch, and the number of values below them."""
    if values.size < 20:
        return None, 0
    low, rest, high = float(values.min()), float(np.quantile(values, 0.1)), float(values.max())
    if rest == high or high - low <= 4 * (high - rest):
        return None, 0
    limits = (rest - 0.5 * (high - rest), high)
    return limits, int(np.sum(values < limits[0]))


def chart_data(series: Sequence[PlottedSeries], level: str) -> dict[str, Any]:
    """Return the numbers of the charts as JSON stores them; non-finite values become null.

    Args:
        series: the series on the page.
        level: the name of the bands, such as "90% band".
    """
    axes: dict[str, tuple[int, Any]] = {}  # panels share their times: each axis is written once

    def band(source: Band, digits: int) -> dict[str, Any]:
        axis = _axis(source.times)
        index, _ = axes.setdefault(json.dumps(axis), (len(axes), axis))
        names = ("centre", "lower", "upper")
        values = {name: _rounded(getattr(source, name), digits) for name in names}
        if source.hollow is not None:
            ends = (source.hollow.lower, source.hollow.upper)
            values["hollow"] = [_rounded(end, digits) for end in ends]
        return {"axis": index, **values}

    def shade(source: Shade) -> dict[str, Any]:
        axis = _axis(source.times)
        index, _ = axes.setdefault(json.dumps(axis), (len(axes), axis))
        strength = [round(float(value), 3) for value in source.strength]
        return {"axis": index, "best": source.most_probable.tolist(), "strength": strength}

    def panel(source: Panel) -> dict[str, Any]:
        digits = _digits(source)
        return {
            "title": visible(source.title),
            **band(source.smoothed, digits),
            "observed": None if source.observed is None else _rounded(source.observed, digits),
            "missing": source.gaps().tolist(),
            "forecast": None if source.forecast is None else band(source.forecast, digits),
            "regimes": None if source.regimes is None else shade(source.regimes),
        }

    shades = {"colours": REGIMES, "opacity": SHADE}
    tree = [{"name": visible(s.name), "panels": [panel(p) for p in s.panels]} for s in series]
    return {
        "level": level,
        "shades": shades,
        "axes": [axis for _, axis in axes.values()],
        "series": tree,
    }


def _axis(times: np.ndarray) -> dict[str, Any]:
    """Return times with all their digits; evenly spaced ones as start, step and count."""
    values, kind = milliseconds(times), "date" if is_dated(times) else "number"
    if values.dtype.kind == "f" and np.all((values == np.floor(values)) & (abs(values) < 2**53)):
        values = values.astype(np.int64)
    if values.size > 2:
        start, step = values[0], values[1] - values[0]
        if np.array_equal(start + step * np.arange(values.size), values):
            regular = {"start": start.item(), "step": step.item(), "count": values.size}
            return {"kind": kind, **regular}
    return {"kind": kind, "values": values.tolist()}


def _digits(panel: Panel) -> int:
    """Return the significant digits of a panel: six of what varies around a large level."""
    band = panel.smoothed
    least = 5 if band.times.size > MANY_ROWS else 6
    columns = [band.centre, band.lower, band.upper, panel.observed]
    values = np.concatenate([np.asarray(c, float) for c in columns if c is not None])
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        spread = np.ptp(values) if values.size else 0.0
    if not 0 < spread < math.inf:
        return least
    return min(15, least + max(0, math.ceil(math.log10(np.abs(values).max() / spread) - 0.5)))


def _rounded(values: np.ndarray, digits: int) -> list[Any]:
    rounded = [float(f"{value:.{digits}g}") for value in np.asarray(values, float).tolist()]
    return [
        None if not math.isfinite(v) else int(v) if v.is_integer() and abs(v) < 1e15 else v
        for v in rounded
    ]
