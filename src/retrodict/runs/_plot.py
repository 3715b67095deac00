"""The panels of a series as one still picture, in a file."""

import io
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrodict._workspace import write_atomically
from retrodict.runs._content import Band, SeriesPanel, is_dated, percent, sides, visible

FORMATS = (".png", ".svg", ".pdf")
"""The kinds of file that `plot` writes, by suffix."""

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.color": "#e8ecf1",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "retrodict",
}


def plot(
    panels: Sequence[SeriesPanel],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    level: float = 0.9,
    centre: str = "mean",
) -> None:
    """Draws panels below one another, on one axis of time, and writes the picture whole.

    Nothing of matplotlib's global state is changed, and the same panels give the same bytes.

    Args:
        panels: what is drawn.
        path: where to; the suffix says the format: .png, .svg or .pdf.
        title: the heading.
        level: the probability within the bands, for the legend.
        centre: what the lines are, for the legend: "mean" or "median".

    Raises:
        ValueError: if there are no panels, or the suffix is another.
        ImportError: if matplotlib is not installed.
    """
    if not panels:
        raise ValueError("There are no panels to draw; give at least one.")

    def draw(figure: Any, axes: list[Any]) -> None:
        for panel, ax in zip(panels, axes, strict=True):
            _draw(panel, ax, level, centre)
        _legend(figure, axes)
        if title:
            figure.suptitle(plain(title), x=0.01, ha="left", fontsize=10)

    write_picture(path, len(panels), draw)


def write_picture(
    path: str | os.PathLike[str], num_panels: int, draw: Callable[[Any, list[Any]], None]
) -> None:
    """Writes panels below one another, whole or not at all, in the style of this library.

    Args:
        path: where to; the suffix says the format: .png, .svg or .pdf.
        num_panels: how many panels.
        draw: draws into the figure and its axes.
    """
    path = Path(path)
    suffix = check_picture(path)
    try:
        from matplotlib import rc_context, rcdefaults, rcParams
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib: pip install 'retrodict[cli]', or pip install matplotlib."
        ) from error
    with rc_context(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing"
        )  # of a name in a script without a font
        rcdefaults()  # not what a user has set for figures of their own
        rcParams.update(_STYLE)
        height = 0.5 + 1.9 * num_panels
        figure = Figure(figsize=(7.5, height), dpi=160, layout="constrained")
        draw(figure, list(figure.subplots(num_panels, 1, squeeze=False, sharex=True).ravel()))
        content = io.BytesIO()
        # Without the date the bytes are the same on every day.
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[suffix]
        figure.savefig(content, format=suffix[1:], metadata=dated)
    write_atomically(path, content.getvalue())


def check_picture(path: Path) -> str:
    """The suffix of a picture, refused if it is no format that is drawn."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"{path.name}: a picture ends in {', '.join(FORMATS)}, not {suffix!r}.")
    return suffix


def plain(text: str) -> str:
    """Text as it stands, for a picture."""
    # A dollar sign in a name is no formula.
    return visible(text).replace("$", r"\$")


def _draw(panel: SeriesPanel, ax: Any, level: float, centre: str) -> None:
    bands: list[tuple[Band | SeriesPanel, str, str]] = [(panel, "#1f65b0", "smoothed")]
    if panel.forecast is not None:
        bands.append((panel.forecast, "#b7410e", "forecast"))
    for band, colour, name in bands:
        label = f"{name} {centre} and {percent(level)} band"
        for lower, upper in sides(band):
            ax.fill_between(
                band.times, lower, upper, color=colour, alpha=0.24, linewidth=0, zorder=2
            )
        ax.plot(band.times, band.centre, color=colour, linewidth=1.2, label=label, zorder=3)
    if panel.observed is not None:
        count = max(1, int(np.isfinite(panel.observed).sum()))
        size = min(2.6, max(0.8, 1200 / count))
        # Many points are drawn below the band, which they would hide.
        below = count > 1000
        ax.plot(
            panel.times,
            panel.observed,
            linestyle="none",
            marker="o",
            markersize=size,
            markeredgewidth=0,
            color="#1a202c",
            alpha=0.45 if below else 1.0,
            label="observed",
            zorder=1 if below else 4,
            rasterized=count > 5000,  # else each point is an object of an SVG or a PDF
        )
    gaps = panel.gaps()
    if gaps.size:
        bottom = np.zeros(gaps.size)
        ax.plot(
            panel.times[gaps],
            bottom,
            linestyle="none",
            marker="|",
            markersize=6,
            color="#8a5a00",
            alpha=max(0.02, min(1.0, 1500 / panel.times.size)),  # marks overlap where rows do
            transform=ax.get_xaxis_transform(),
            label="missing",
            zorder=5,
        )
    ax.set_title(plain(panel.title))
    ax.margins(x=0.01)
    if is_dated(panel.times):
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        locator = AutoDateLocator(minticks=4, maxticks=9)
        ax.xaxis.set_major_locator(locator)
        ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """One legend for all panels: what any of them shows."""
    marks = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            marks.setdefault(label, handle)
    legend = figure.legend(
        marks.values(), marks.keys(), loc="outside lower center", ncols=len(marks)
    )
    for handle in legend.legend_handles:  # seen in the legend, however fine the marks are
        handle.set_alpha(1.0)
        if handle.get_marker() == "o":
            handle.set_markersize(3)
