"""How figures look: paper-sized, legible in grey, the same bytes from the same numbers."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

WIDTH = 6.5
"""The width of a page of text, in inches."""

INKS = ("#0b2545", "#b7410e", "#2f9e6e", "#8e7cc3", "#a0aec0")
"""Colours from dark to light, which differ in grey; every line has a style or a marker besides."""
DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (7, 2, 1.5, 2)), (0, (3, 1.5)))
MARKERS = ("o", "^", "s", "D", "v")

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "retrodict",
}


class Picture(NamedTuple):
    """A figure, ready to be written.

    Attributes:
        name: the name of its files, without a suffix.
        caption: what is to be seen, axes and units included.
        svg: the figure as lines.
        png: the figure as dots, 200 an inch.
    """

    name: str
    caption: str
    svg: bytes
    png: bytes


def draw(
    name: str,
    caption: str,
    fill: Callable[..., None],
    *,
    rows: int = 1,
    columns: int = 1,
    height: float = 2.6,
    **options: Any,
) -> Picture:
    """Draws a figure outside of pyplot, so that nothing global is left changed.

    Args:
        name: the name of its files.
        caption: what is to be seen.
        fill: called with the axes, row by row, to draw on.
        rows: rows of axes.
        columns: columns of axes.
        height: the height in inches.
        **options: what else `Figure.subplots` takes.
    """
    with rc_context():
        rcdefaults()  # not what a user has set for figures of their own
        rcParams.update(_STYLE)
        figure = Figure(figsize=(WIDTH, height), dpi=200, layout="constrained")
        fill(*figure.subplots(rows, columns, squeeze=False, **options).ravel())
        png, svg = io.BytesIO(), io.BytesIO()
        FigureCanvasAgg(figure).print_png(png)
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
    return Picture(name, caption, svg.getvalue(), png.getvalue())
