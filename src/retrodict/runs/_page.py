"""The report of a run: one page of HTML that needs nothing beside it, and no network."""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from html import escape as escape_html
from importlib import resources
from typing import Any

import numpy as np

from retrodict.runs._content import (
    Band,
    Curve,
    ReportContent,
    Series,
    SeriesPanel,
    Verdict,
    is_dated,
    percent,
    sides,
    visible,
)
from retrodict.runs._still import Shape, still

MAX_SERIES = 50
"""How many series a page holds."""

MAX_NUMBERS = 1_500_000
"""How many numbers a page holds, about 9 bytes each; the first series is there at any length."""

MANY_ROWS = 20_000
"""From this many rows on numbers have one digit less, so that a page stays small."""

_WORDS: dict[Verdict, str] = {
    "good": "Good",
    "doubtful": "Doubtful",
    "bad": "Bad",
    "unknown": "Not judged",
}


def escape(text: str) -> str:
    """Return a text as HTML that shows it."""
    return escape_html(visible(text))


def page(content: ReportContent) -> str:
    """The page of a run as HTML.

    Its charts are zoomed by wheel, fingers, keys and buttons; without scripts it shows still
    pictures of the first series. The same content gives the same bytes. Names of columns and of
    series are text wherever they stand, whatever they hold.

    Args:
        content: what it says.
    """
    shown = _that_fit(content.series)
    style = _asset("page.css")
    script = f'(() => {{\n"use strict";\n{_asset("axis.js")}\n{_asset("charts.js")}}})();\n'
    body = [
        f"<h1>{escape(content.title)}</h1>",
        *_summary(content),
        *_section("Data", [_list(content.data)] if content.data else []),
        *_section("Series", _charts(content, shown) if shown else []),
        *_section("Parameters", _parameters(content) if content.parameters else []),
        *_section("Training", _training(content) if content.training else []),
        *_section("Diagnostics", _diagnostics(content) if content.diagnostics else []),
        *_section("How to reproduce", _reproduce(content)),
    ]
    if shown:
        data = _payload(content, shown)
        body.append(f'<script type="application/json" id="payload">{data}</script>')
        body.append(f"<script>{script}</script>")
    # The browser is asked to run this one script, and to fetch nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    text = "\n".join(body)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(content.title)}</title>\n<style>\n{style}</style>\n"
        "<noscript><style>.controls, .keys { display: none; }</style></noscript>\n</head>\n"
        f"<body>\n<main>\n{text}\n</main>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("retrodict.runs").joinpath("_assets", name).read_text("utf-8")


def _that_fit(series: Sequence[Series]) -> Sequence[Series]:
    """The first series, as many as a page holds."""
    sizes = [sum(4 * p.times.size for p in one.panels) for one in series[:MAX_SERIES]]
    fit = int(np.searchsorted(np.cumsum(sizes), MAX_NUMBERS, side="right"))
    return series[: max(1, fit)]


# Data for the charts.


def _payload(content: ReportContent, shown: Sequence[Series]) -> str:
    axes: dict[str, int] = {}  # panels share their times: each axis is written once

    def axis(times: np.ndarray) -> int:
        return axes.setdefault(_json(_axis(times)), len(axes))

    def band(of: Band | SeriesPanel, digits: int) -> dict[str, Any]:
        names = ("centre", "lower", "upper")
        values: dict[str, Any] = {name: _numbers(getattr(of, name), digits) for name in names}
        if of.hollow is not None:
            values["hollow"] = [_numbers(end, digits) for end in (of.hollow.lower, of.hollow.upper)]
        return {"axis": axis(of.times), **values}

    def panel(of: SeriesPanel) -> dict[str, Any]:
        digits = _digits(of)
        return {
            "title": visible(of.title),
            **band(of, digits),
            "observed": None if of.observed is None else _numbers(of.observed, digits),
            "missing": of.gaps().tolist(),
            "forecast": None if of.forecast is None else band(of.forecast, digits),
        }

    series = _json(
        [{"name": visible(s.name), "panels": [panel(p) for p in s.panels]} for s in shown]
    )
    written = f'{{"level":{_json(_level(content))},"axes":[{",".join(axes)}],"series":{series}}}'
    # In a string of JSON this is the same character, and no tag can end or begin.
    return written.replace("<", "\\u003c")


def _json(tree: Any) -> str:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


def _axis(times: np.ndarray) -> dict[str, Any]:
    """Times with all their digits, dates in milliseconds; evenly spaced ones as start and step."""
    values, kind = times, "number"
    if is_dated(times):
        values, kind = _milliseconds(times), "date"
    if values.dtype.kind == "f" and np.all(values == np.floor(values)):
        values = values.astype(np.int64) if np.all(np.abs(values) < 2**53) else values
    if values.size > 2:
        start, step = values[0], values[1] - values[0]
        if np.array_equal(start + step * np.arange(values.size), values):
            regular = {"start": start.item(), "step": step.item(), "count": values.size}
            return {"kind": kind, **regular}
    return {"kind": kind, "values": values.tolist()}


def _milliseconds(times: np.ndarray) -> np.ndarray:
    return times.astype("datetime64[us]").astype(np.int64) / 1000


def _digits(panel: SeriesPanel) -> int:
    """Significant digits for a panel: six of what varies, below a level that may be large."""
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
    written = [float(form % value) for value in np.asarray(values, float).tolist()]
    return [
        None if not math.isfinite(v) else int(v) if v.is_integer() and abs(v) < 1e15 else v
        for v in written
    ]


# Sections.


def _section(heading: str, parts: Sequence[str]) -> list[str]:
    return [f"<section>\n<h2>{heading}</h2>", *parts, "</section>"] if parts else []


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _mark(verdict: Verdict) -> str:
    return f'<span class="mark {verdict}">{_WORDS[verdict]}</span>'


def _summary(content: ReportContent) -> list[str]:
    paragraphs = [f"<p>{escape(text)}</p>" for text in content.summary]
    if content.verdict is None:
        return paragraphs
    first = f"<p>{_mark(content.verdict)}</p>"
    return [f'<div class="verdict {content.verdict}">', first, *paragraphs, "</div>"]


def _level(content: ReportContent) -> str:
    return f"{percent(content.level)} band"


def _charts(content: ReportContent, shown: Sequence[Series]) -> list[str]:
    panels = [panel for one in shown for panel in one.panels]
    legend = [("band", f"smoothed {content.centre} and {_level(content)}")]
    if any(panel.observed is not None for panel in panels):
        legend.insert(0, ("dot", "observed"))
    if any(panel.forecast is not None for panel in panels):
        legend.append(("ahead", f"forecast and {_level(content)}"))
    if any(panel.gaps().size for panel in panels):
        legend.append(("gap", "missing"))
    marks = "".join(f'<li><i class="{kind}"></i>{escape(text)}</li>' for kind, text in legend)
    parts = [f"<p>{escape(content.band)}</p>"] if content.band else []
    if left_out := len(content.series) - len(shown):
        parts.append(
            f'<p class="soft">The first {len(shown)} of {len(content.series)} series are on this '
            f"page; {left_out} {'is' if left_out == 1 else 'are'} left out.</p>"
        )
    parts.append(f'<ul class="legend">{marks}</ul>')
    choice = ""
    if len(shown) > 1:
        options = "".join(
            f'<option value="{i}">{escape(s.name)}</option>' for i, s in enumerate(shown)
        )
        choice = f'<label>Series <select id="series">{options}</select></label>'
    buttons = "".join(
        f'<button type="button" id="{name}" aria-label="{label}" title="{label}">{sign}</button>'
        for name, label, sign in (
            ("zoom-in", "Zoom in", "+"),
            ("zoom-out", "Zoom out", "−"),
            ("earlier", "Earlier", "←"),
            ("later", "Later", "→"),
            ("reset", "Show all", "All"),
        )
    )
    fallback = (
        "<p>The charts can be zoomed where scripts run. Without them, "
        f"{'this is the series' if len(content.series) == 1 else 'this is the first series'}:</p>"
    )
    return [
        *parts,
        f'<div class="controls">{choice}{buttons}<output id="range"></output></div>',
        '<p class="soft keys">Wheel or pinch to zoom, drag to move, double click to see all. On a '
        "chart in focus: + and − zoom, ← and → move, 0 shows all.</p>",
        '<div id="charts"></div>',
        f"<noscript>{fallback}{_still_panels(shown[0])}{_extent(shown)}</noscript>",
    ]


def _still_panels(series: Series) -> str:
    parts = []
    for panel in series.panels:
        dated = is_dated(panel.times)
        xs = _milliseconds(panel.times) if dated else panel.times
        shapes = [
            *(Shape("band", "smoothed", xs, *ends) for ends in sides(panel)),
            Shape("line", "smoothed", xs, panel.centre),
        ]
        if panel.observed is not None:
            shapes.insert(-1, Shape("dots", "observed", xs, panel.observed))
        if (ahead := panel.forecast) is not None:
            later = _milliseconds(ahead.times) if dated else ahead.times
            shapes += [Shape("band", "forecast", later, *ends) for ends in sides(ahead)]
            shapes.append(Shape("line", "forecast", later, ahead.centre))
        picture = still(shapes, f"{panel.title} over time", dated=dated)
        parts.append(f"<figure><figcaption>{escape(panel.title)}</figcaption>{picture}</figure>")
    return "".join(parts)


def _extent(shown: Sequence[Series]) -> str:
    """What the series are, for who cannot see them drawn."""
    rows = []
    for one in shown:
        for panel in one.panels:
            seen = panel.observed[np.isfinite(panel.observed)] if panel.observed is not None else ()
            extent = f"{_figure(min(seen))} to {_figure(max(seen))}" if len(seen) else "–"
            rows.append([one.name, panel.title, str(panel.times.size), str(len(seen)), extent])
    titles = ["Series", "Of", "Rows", "Observed", "Least to greatest"]
    return _table(titles, [[escape(cell) for cell in row] for row in rows], numeric={2, 3})


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], numeric: set[int]) -> str:
    """A table of cells that are HTML already."""

    def kind(i: int) -> str:
        return ' class="number"' if i in numeric else ""

    head = "".join(f'<th scope="col"{kind(i)}>{escape(t)}</th>' for i, t in enumerate(titles))
    # On a narrow screen each cell shows its title.
    lines = "".join(
        "<tr>"
        + "".join(
            f'<td{kind(i)} data-title="{escape(title)}"><span>{cell}</span></td>'
            for i, (title, cell) in enumerate(zip(titles, row, strict=True))
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _figure(value: float | None, digits: int = 4) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.{digits}g}".replace("-", "−")


def _estimate(value: float, error: float | None) -> str:
    """An estimate with the digits that its error leaves it, four at least."""
    if not (error and math.isfinite(error) and math.isfinite(value) and value):
        return _figure(value)
    needed = math.floor(math.log10(abs(value))) - math.floor(math.log10(error)) + 2
    return _figure(value, min(12, max(4, needed)))


def _parameters(content: ReportContent) -> list[str]:
    lines, methods = content.parameters, any(line.method for line in content.parameters)
    titles = ["Name", "Estimate", "Standard error", f"{percent(content.level)} interval", ""]
    rows = []
    for line in lines:
        ends = line.interval and [_estimate(end, line.error) for end in line.interval]
        interval = " to ".join(ends) if ends else line.note or "–"
        state = "learned" if line.learned else "fixed"
        cells = [line.name, _estimate(line.estimate, line.error), _figure(line.error, 2), interval]
        rows.append([escape(cell) for cell in [*cells, state, line.method][: 5 + methods]])
    titles = [*titles[:4], "Learned or fixed", "Method"][: 5 + methods]
    table = _table(titles, rows, numeric={1, 2, 3})
    note = f"<p>{escape(content.parameters_method)}</p>" if content.parameters_method else ""
    return [part for part in (note, table) if part]


def _training(content: ReportContent) -> list[str]:
    values = np.concatenate([np.asarray(c.values, float) for c in content.training])
    limits, below = _limits(values[np.isfinite(values)])
    dashes = ("", "6 3", "2 3", "8 3 2 3")
    inks = ("smoothed", "forecast", "observed", "missing")
    shapes = [
        Shape("line", inks[i % 4], curve.steps, curve.values, None, dashes[i % 4])
        for i, curve in enumerate(content.training)
    ]
    label = content.training_label or "What was reached"
    note = [f"<p>{escape(content.training_note)}</p>"] if content.training_note else []
    names = "; ".join(
        f"{curve.name}: {look} line, at the end {_figure(_last(curve), 6)}"
        for curve, look in zip(
            content.training, ("full", "dashed", "dotted", "dash-dotted") * 9, strict=False
        )
    )
    off = f" {below} values lie below the picture." if below else ""
    caption = f"{label}, by step. {names}.{off}"
    picture = still(shapes, caption, limits=limits)
    return [*note, f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"]


def _last(curve: Curve) -> float | None:
    finite = curve.values[np.isfinite(curve.values)]
    return float(finite[-1]) if finite.size else None


def _limits(values: np.ndarray) -> tuple[tuple[float, float] | None, int]:
    """Limits that show how training ended where a poor start would flatten it, and what is cut."""
    if values.size < 20:
        return None, 0
    low, rest, high = float(values.min()), float(np.quantile(values, 0.1)), float(values.max())
    if rest == high or high - low <= 4 * (high - rest):
        return None, 0
    limits = (rest - 0.5 * (high - rest), high)
    return limits, int(np.sum(values < limits[0]))


def _diagnostics(content: ReportContent) -> list[str]:
    rows = [
        [
            escape(line.name),
            escape(line.value if isinstance(line.value, str) else _figure(line.value)),
            _mark(line.verdict),
            escape(line.meaning),
        ]
        for line in content.diagnostics
    ]
    return [_table(["Check", "Value", "Verdict", "Meaning"], rows, numeric=set())]


def _reproduce(content: ReportContent) -> list[str]:
    parts = []
    if content.commands:
        parts.append(f"<pre><code>{chr(10).join(map(escape, content.commands))}</code></pre>")
    if content.facts:
        pairs = (f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in content.facts)
        parts.append(f"<dl>{''.join(pairs)}</dl>")
    return parts
