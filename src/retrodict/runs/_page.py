"""The report of a run: one HTML page that needs no other file and no network."""

import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from retrodict._pages import render_page, visible
from retrodict.runs._content import Curve, ReportContent, Series, SeriesPanel, percent, sides
from retrodict.runs._payload import chart_data, milliseconds
from retrodict.runs._svg import Shape, svg_chart

MAX_SERIES = 50
"""The largest number of series on a page."""

MAX_NUMBERS = 1_500_000
"""The largest number of numbers on a page, about 9 bytes each; the first series is always shown."""

VERDICTS = {"good": "Good", "doubtful": "Doubtful", "bad": "Bad", "unknown": "Not checked"}

BUTTONS = (
    ("zoom-in", "Zoom in", "+"),
    ("zoom-out", "Zoom out", "−"),
    ("earlier", "Earlier", "←"),
    ("later", "Later", "→"),
    ("reset", "Show everything", "All"),
)

LINES = (
    ("solid", "smoothed", ""),
    ("dashed", "forecast", "6 3"),
    ("dotted", "observed", "2 3"),
    ("dash-dotted", "missing", "8 3 2 3"),
)
"""The look, colour and dash pattern of training curves, in order."""


def page(content: ReportContent) -> str:
    """Return the report of a run as HTML.

    The charts are zoomed with the wheel, two fingers, keys or buttons. Without JavaScript the page
    shows static charts of the first series. The same content gives the same bytes. Names of columns
    and series are shown as text, whatever they contain.

    Args:
        content: the content of the report.
    """
    series = _fitting(content.series)
    level = f"{percent(content.level)} band"
    return render_page(
        "retrodict.runs",
        "report.html",
        script=_script() if series else "",
        title=content.title,
        content=content,
        series=series,
        legend=_legend(content, series, level),
        buttons=BUTTONS,
        verdicts=VERDICTS,
        pictures=[(panel.title, _picture(panel)) for panel in series[0].panels] if series else [],
        ranges=[_range(one, panel) for one in series for panel in one.panels],
        parameters=_parameters(content),
        training=_training(content) if content.training else None,
        payload=_visible(chart_data(series, level)),
        number=_number,
    )


def _script() -> str:
    folder = resources.files("retrodict.runs").joinpath("templates")
    parts = [folder.joinpath(name).read_text("utf-8") for name in ("axis.js", "charts.js")]
    return f'(() => {{\n"use strict";\n{parts[0]}\n{parts[1]}}})();\n'


def _fitting(series: Sequence[Series]) -> Sequence[Series]:
    """Return the first series that fit into the limits of a page."""
    sizes = [sum(4 * p.times.size for p in one.panels) for one in series[:MAX_SERIES]]
    count = int(np.searchsorted(np.cumsum(sizes), MAX_NUMBERS, side="right"))
    return series[: max(1, count)]


def _visible(tree: Any) -> Any:
    """Return the tree with the names of its series and panels made visible."""
    for one in tree["series"]:
        one["name"] = visible(one["name"])
        for panel in one["panels"]:
            panel["title"] = visible(panel["title"])
    return tree


def _legend(content: ReportContent, series: Sequence[Series], level: str) -> list[tuple[str, str]]:
    panels = [panel for one in series for panel in one.panels]
    legend = [("band", f"smoothed {content.centre} and {level}")]
    if any(panel.observed is not None for panel in panels):
        legend.insert(0, ("dot", "observed"))
    if any(panel.forecast is not None for panel in panels):
        legend.append(("ahead", f"forecast and {level}"))
    if any(panel.gaps().size for panel in panels):
        legend.append(("gap", "missing"))
    return legend


def _picture(panel: SeriesPanel) -> str:
    """Return the static chart of a panel."""
    xs = milliseconds(panel.times)
    shapes = [Shape("band", "smoothed", xs, *ends) for ends in sides(panel)]
    if panel.observed is not None:
        shapes.append(Shape("dots", "observed", xs, panel.observed))
    shapes.append(Shape("line", "smoothed", xs, panel.centre))
    if (ahead := panel.forecast) is not None:
        later = milliseconds(ahead.times)
        shapes += [Shape("band", "forecast", later, *ends) for ends in sides(ahead)]
        shapes.append(Shape("line", "forecast", later, ahead.centre))
    return svg_chart(shapes, f"{panel.title} over time", dated=panel.times.dtype.kind == "M")


def _range(series: Series, panel: SeriesPanel) -> list[str]:
    values = panel.observed if panel.observed is not None else np.zeros(0)
    values = values[np.isfinite(values)]
    extent = f"{_number(values.min())} to {_number(values.max())}" if values.size else "–"
    return [series.name, panel.title, str(panel.times.size), str(values.size), extent]


def _number(value: float | None, digits: int = 4) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.{digits}g}".replace("-", "−")


def _estimate(value: float, error: float | None) -> str:
    """Return an estimate with the digits that its standard error justifies, at least four."""
    if not (error and math.isfinite(error) and math.isfinite(value) and value):
        return _number(value)
    needed = math.floor(math.log10(abs(value))) - math.floor(math.log10(error)) + 2
    return _number(value, min(12, max(4, needed)))


def _parameters(content: ReportContent) -> dict[str, Any]:
    with_method = any(line.method for line in content.parameters)
    titles = ["Name", "Estimate", "Standard error", f"{percent(content.level)} interval"]
    rows = []
    for line in content.parameters:
        ends = line.interval and [_estimate(end, line.error) for end in line.interval]
        interval = " to ".join(ends) if ends else line.note or "–"
        cells = [line.name, _estimate(line.estimate, line.error), _number(line.error, 2), interval]
        cells += ["learned" if line.learned else "fixed", line.method]
        rows.append(cells[: 5 + with_method])
    return {"titles": [*titles, "Learned or fixed", "Method"][: 5 + with_method], "rows": rows}


def _training(content: ReportContent) -> dict[str, Any]:
    values = np.concatenate([np.asarray(c.values, float) for c in content.training])
    limits, num_below = _limits(values[np.isfinite(values)])
    shapes, curves = [], []
    for i, curve in enumerate(content.training):
        look, ink, dashes = LINES[i % len(LINES)]
        shapes.append(Shape("line", ink, curve.steps, curve.values, None, dashes))
        curves.append(f"{curve.name}: {look} line, {_number(_last(curve), 6)} at the end")
    label = content.training_label or "Objective"
    below = f" {num_below} values are below the chart." if num_below else ""
    caption = f"{label} by step. {'; '.join(curves)}.{below}"
    return {"picture": svg_chart(shapes, caption, limits=limits), "caption": caption}


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
