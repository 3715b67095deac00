"""The panels of a series as one static picture, in a file."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from retrodict._files import write_atomically
from retrodict._pages import render_figure, visible
from retrodict.runs._report_content import (
    Band,
    Curve,
    Panel,
    Shade,
    is_dated,
    milliseconds,
    percent,
)

FORMATS = (".png", ".svg", ".pdf")
"""The suffixes of the files that `plot` writes."""

STYLE: Mapping[str, Any] = {
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e8ecf1",
    "grid.linewidth": 0.6,
}


COLOURS = {
    "smoothed": "#1f65b0",
    "forecast": "#b7410e",
    "observed": "#1a202c",
    "missing": "#8a5a00",
}


REGIMES = ("#2a9d8f", "#e0a100", "#c2468f", "#6b5bd2", "#7a8450", "#56789a")
"""The colours of regimes, in order; more regimes repeat them."""

SHADE = 0.34
"""The opacity of a certain regime."""

LINES = (
    ("solid", "smoothed"),
    ("dashed", "forecast"),
    ("dotted", "observed"),
    ("dashdot", "missing"),
)
"""The style and the colour of training curves, in order."""

SECONDS_PER_YEAR = 365.2425 * 24 * 3600

MAX_MARKS = 5
"""A legend with more entries has two rows."""

MAX_VECTORS = 5000
"""Longer series are drawn as pixels, also in SVG and PDF files."""


def plot(
    panels: Sequence[Panel],
    path: Path,
    *,
    title: str = "",
    level: float = 0.9,
    centre: str = "mean",
) -> None:
    """Draw panels below one another, with one time axis, and write the picture atomically.

    matplotlib's global state is not changed, and the same panels give the same bytes.

    Args:
        panels: the panels.
        path: the file; its suffix is the format: .png, .svg or .pdf.
        title: the heading.
        level: the probability within the bands, for the legend.
        centre: the name of the lines in the legend: "mean" or "median".

    Raises:
        ValueError: if there are no panels, or the suffix is unknown.
        ImportError: if matplotlib is not installed.
    """
    if not panels:
        raise ValueError("There are no panels to draw; pass at least one.")
    draw = partial(draw_panels, panels=panels, title=title, level=level, centre=centre)
    write_picture(path, len(panels), draw)


def write_picture(path: Path, num_panels: int, draw: Callable[[Any, list[Any]], None]) -> None:
    """Write panels below one another to a file, atomically.

    Args:
        path: the file; its suffix is the format: .png, .svg or .pdf.
        num_panels: the number of panels.
        draw: draws, given the figure and its axes.
    """
    write_atomically(path, render_picture(check_picture(path)[1:], num_panels, draw))


def render_picture(
    suffix: str, num_panels: int, draw: Callable[[Any, list[Any]], None], **style: Any
) -> bytes:
    """Return panels below one another as a picture; arguments are those of `write_picture`."""
    style = {**STYLE, **style}
    size = (7.5, 0.5 + 1.9 * num_panels)
    return render_figure(
        draw, [suffix], size=size, dpi=160, rows=num_panels, style=style, sharex=True
    )[suffix]


def check_picture(path: Path) -> str:
    """Return the suffix of a picture; raise `ValueError` unless it is one of `FORMATS`."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"{path.name}: a picture ends in {', '.join(FORMATS)}, not {suffix!r}.")
    return suffix


def literal(text: str) -> str:
    """Escape a text for matplotlib: a dollar sign does not start a formula."""
    return visible(text).replace("$", r"\$")


def draw_panels(
    figure: Any,
    axes: list[Any],
    *,
    panels: Sequence[Panel],
    title: str = "",
    level: float,
    centre: str,
) -> None:
    """Draw panels with one legend; arguments are those of `plot`."""
    for panel, ax in zip(panels, axes, strict=True):
        label = f"{centre} and {percent(level)} band"
        _draw_band(ax, panel.smoothed, "smoothed", f"smoothed {label}")
        if panel.observed is not None:
            _draw_observed(ax, panel.smoothed.times, panel.observed)
        if panel.forecast is not None:
            _draw_band(ax, panel.forecast, "forecast", f"forecast {label}")
        _draw_gaps(ax, panel)
        if panel.regimes is not None:
            _draw_regimes(ax, panel.regimes)
        ax.set_title(literal(panel.title))
        ax.margins(x=0.01)
        if is_dated(_abscissae(panel.smoothed.times)):
            from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

            locator = AutoDateLocator(minticks=4, maxticks=9)
            ax.xaxis.set_major_locator(locator)
            ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    _legend(figure, axes)
    if title:
        figure.suptitle(literal(title), x=0.01, ha="left", fontsize=10)


def draw_curves(
    _: Any, axes: list[Any], *, curves: Sequence[Curve], limits: tuple[float, float] | None
) -> None:
    """Draw training curves, with values below the limits cut off."""
    (ax,) = axes
    for curve, (style, ink) in zip(curves, cycle(LINES), strict=False):
        ax.plot(
            curve.steps, _drawable(curve.values), linestyle=style, color=COLOURS[ink], linewidth=1.2
        )
    if limits is not None:
        pad = 0.05 * (limits[1] - limits[0])
        ax.set_ylim(limits[0] - pad, limits[1] + pad)
    ax.margins(x=0.01)


def _abscissae(times: np.ndarray) -> np.ndarray:
    """Return times; dates that matplotlib cannot format as numbers of years."""
    years = times.astype("datetime64[Y]").astype(int) + 1970 if is_dated(times) else np.zeros(0)
    if np.all((years >= 100) & (years <= 9900)):
        return times
    return 1970 + milliseconds(times) / (1000 * SECONDS_PER_YEAR)


def _drawable(values: np.ndarray) -> np.ndarray:
    """Return values; those that overflow where axes are computed become NaN."""
    return np.where(np.abs(values) < 1e300, values, np.nan)


def _draw_band(ax: Any, band: Band, ink: str, label: str) -> None:
    """Draw a band, or both sides of its gap, and its line.

    In rows with one mode the two sides touch at the centre.
    """
    xs = _abscissae(band.times)
    centre, lower, upper = map(_drawable, (band.centre, band.lower, band.upper))
    sides = [(lower, upper)]
    if band.hollow is not None:
        whole = np.isnan(band.hollow.lower)
        below = np.where(whole, centre, band.hollow.lower)
        above = np.where(whole, centre, band.hollow.upper)
        sides = [(lower, below), (above, upper)]
    options: Any = {"color": COLOURS[ink], "rasterized": len(xs) > MAX_VECTORS}
    for low, high in sides:
        ax.fill_between(xs, low, high, alpha=0.24, linewidth=0, zorder=2, **options)
    ax.plot(xs, centre, linewidth=1.2, label=label, zorder=3, **options)


def _draw_observed(ax: Any, times: np.ndarray, observed: np.ndarray) -> None:
    count = max(1, int(np.isfinite(observed).sum()))
    below = count > 1000  # many points would hide the band, and are drawn below it
    ax.plot(
        _abscissae(times),
        _drawable(observed),
        "o",
        markersize=min(2.6, max(0.8, 1200 / count)),
        markeredgewidth=0,
        color=COLOURS["observed"],
        alpha=0.45 if below else 1.0,
        label="observed",
        zorder=1 if below else 4,
        rasterized=count > MAX_VECTORS,
    )


def _draw_gaps(ax: Any, panel: Panel) -> None:
    gaps, times = panel.gaps(), panel.smoothed.times
    if gaps.size:
        ax.plot(
            _abscissae(times)[gaps],
            np.zeros(gaps.size),
            "|",
            markersize=6,
            color=COLOURS["missing"],
            alpha=max(0.02, min(1.0, 1500 / times.size)),  # marks overlap where rows do
            transform=ax.get_xaxis_transform(),
            label="missing",
            zorder=5,
            rasterized=gaps.size > MAX_VECTORS,
        )


def _draw_regimes(ax: Any, shade: Shade) -> None:
    """Shade each row by its most probable regime, the stronger the more certain it is."""
    from matplotlib.colors import to_rgba

    xs = _abscissae(shade.times)
    positions = np.asarray(ax.convert_xunits(xs), float)
    edges = edges_of(positions)
    best, strength = shade.most_probable, np.clip(shade.strength, 0.0, 1.0)
    for regime in range(shade.probabilities.shape[1]):
        rows, colour = np.flatnonzero(best == regime), REGIMES[regime % len(REGIMES)]
        spans = list(zip(edges[rows], edges[rows + 1] - edges[rows], strict=True))
        ax.broken_barh(
            spans,
            (0, 1),
            facecolors=[to_rgba(colour, SHADE * strength[row]) for row in rows],
            linewidth=0,
            transform=ax.get_xaxis_transform(),
            zorder=0.5,
            rasterized=len(xs) > MAX_VECTORS,
        )
        ax.fill_between([], [], [], color=colour, alpha=SHADE, label=f"regime {regime + 1}")


def edges_of(positions: np.ndarray) -> np.ndarray:
    """Return the ends of rows: halfway to their neighbours."""
    if positions.size < 2:
        return np.array([positions[0] - 0.5, positions[0] + 0.5])
    middle = (positions[1:] + positions[:-1]) / 2
    ends = 2 * positions[[0, -1]] - middle[[0, -1]]
    return np.concatenate([ends[:1], middle, ends[1:]])


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """Draw one legend for all panels."""
    marks = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            marks.setdefault(label, handle)
    columns = len(marks) if len(marks) <= MAX_MARKS else -(-len(marks) // 2)
    legend = figure.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=columns)
    for handle in legend.legend_handles:  # visible in the legend, however fine the marks are
        if not hasattr(handle, "get_marker"):
            continue  # a shaded regime
        handle.set_alpha(1.0)
        if handle.get_marker() == "o":
            handle.set_markersize(3)
