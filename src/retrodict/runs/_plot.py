"""The panels of a series as one static picture, in a file."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrodict._files import write_atomically
from retrodict._pages import render_figure, visible
from retrodict.runs._report_content import SeriesPanel, is_dated, percent, shapes_of_panel

FORMATS = (".png", ".svg", ".pdf")
"""The suffixes of the files that `plot` writes."""

STYLE: Mapping[str, Any] = {
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e8ecf1",
    "grid.linewidth": 0.6,
}


COLOURS = {"smoothed": "#1f65b0", "forecast": "#b7410e", "observed": "#1a202c"}


def plot(
    panels: Sequence[SeriesPanel],
    path: str | os.PathLike[str],
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

    def draw(figure: Any, axes: list[Any]) -> None:
        for panel, ax in zip(panels, axes, strict=True):
            _draw(panel, ax, level, centre)
        _legend(figure, axes)
        if title:
            figure.suptitle(literal(title), x=0.01, ha="left", fontsize=10)

    write_picture(path, len(panels), draw)


def write_picture(
    path: str | os.PathLike[str], num_panels: int, draw: Callable[[Any, list[Any]], None]
) -> None:
    """Write panels below one another to a file, atomically.

    Args:
        path: the file; its suffix is the format: .png, .svg or .pdf.
        num_panels: the number of panels.
        draw: draws, given the figure and its axes.
    """
    suffix = check_picture(Path(path))[1:]
    size = (7.5, 0.5 + 1.9 * num_panels)
    files = render_figure(
        draw, [suffix], size=size, dpi=160, rows=num_panels, style=STYLE, sharex=True
    )
    write_atomically(Path(path), files[suffix])


def check_picture(path: Path) -> str:
    """Return the suffix of a picture; raise `ValueError` unless it is one of `FORMATS`."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"{path.name}: a picture ends in {', '.join(FORMATS)}, not {suffix!r}.")
    return suffix


def literal(text: str) -> str:
    """Escape a text for matplotlib: a dollar sign does not start a formula."""
    return visible(text).replace("$", r"\$")


def _draw(panel: SeriesPanel, ax: Any, level: float, centre: str) -> None:
    for shape in shapes_of_panel(panel):
        xs, ys, colour = shape.xs, shape.low, COLOURS[shape.ink]
        if shape.kind == "band":
            ax.fill_between(xs, ys, shape.high, color=colour, alpha=0.24, linewidth=0, zorder=2)
        elif shape.kind == "line":
            label = f"{shape.ink} {centre} and {percent(level)} band"
            ax.plot(xs, ys, color=colour, linewidth=1.2, label=label, zorder=3)
        else:
            count = max(1, int(np.isfinite(ys).sum()))
            below = count > 1000  # many points would hide the band, and are drawn below it
            ax.plot(
                xs,
                ys,
                "o",
                markersize=min(2.6, max(0.8, 1200 / count)),
                markeredgewidth=0,
                color=colour,
                alpha=0.45 if below else 1.0,
                label=shape.ink,
                zorder=1 if below else 4,
                rasterized=count > 5000,  # otherwise each point is an object of an SVG or PDF file
            )
    gaps = panel.gaps()
    if gaps.size:
        ax.plot(
            panel.times[gaps],
            np.zeros(gaps.size),
            "|",
            markersize=6,
            color="#8a5a00",
            alpha=max(0.02, min(1.0, 1500 / panel.times.size)),  # marks overlap where rows do
            transform=ax.get_xaxis_transform(),
            label="missing",
            zorder=5,
        )
    ax.set_title(literal(panel.title))
    ax.margins(x=0.01)
    if is_dated(panel.times):
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        locator = AutoDateLocator(minticks=4, maxticks=9)
        ax.xaxis.set_major_locator(locator)
        ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """Draw one legend for all panels."""
    marks = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            marks.setdefault(label, handle)
    legend = figure.legend(
        marks.values(), marks.keys(), loc="outside lower center", ncols=len(marks)
    )
    for handle in legend.legend_handles:  # visible in the legend, however fine the marks are
        handle.set_alpha(1.0)
        if handle.get_marker() == "o":
            handle.set_markersize(3)
